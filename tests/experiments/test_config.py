"""Configs: what is accepted, and what is said of the rest."""

import math
from pathlib import Path

import pytest

from jaxattn import experiments
from jaxattn.experiments import registry
from jaxattn.experiments.catalogue import Catalogue
from jaxattn.experiments.config import Source, flatten
from jaxattn.fields import ConfigError

WIRED = {"value_norm": True, "dropout_rate": 0.25}, {}
CONFIGS = Path(__file__).parents[2] / "configs"

ARMS = (
    "adam, em_majorised, em_prototype, frozen_values, momentum, output_fast,"
    " random_frame, routing_fast, sgd, sgd_10x, values_fast"
)


def load(variant="", name="sticky"):
    return experiments.load(f"{CONFIGS / name}.py{variant and ':' + variant}").config


def override(config, field, text):
    source = Source(config, Catalogue(), "", {})
    experiments.overridden(source, [(field, text)])


def check(config):
    experiments.check(config)


@pytest.mark.parametrize("variant", ["", "smoke", "parity"])
def test_variants_are_right_as_they_come(variant):
    config = load(variant)
    check(config)
    assert config.name == ("sticky-" + variant if variant else "sticky")


def test_parity_is_the_script_s_protocol():
    config = load("parity")
    assert (config.seeds, config.steps, config.run_arms) == (
        5,
        1000,
        ("sgd", "values_fast"),
    )
    assert config.task.stay == pytest.approx(0.349802, abs=5e-7)
    assert config.arms.sgd.learning_rate == 0.01
    fields = config.arms.values_fast.to_dict()
    assert {name: fields[name] for name in fields if "rate" in name} == {
        "routing_rate": 0.01,
        "value_rate": 0.1,
        "output_rate": 0.01,
    }


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("steps", "1e3", 1000),
        ("steps", "250", 250),
        ("task.stay", "1", 1.0),
        ("arms.sgd.learning_rate", "1e-2", 0.01),
        ("fresh", "true", True),
        ("fresh", "False", False),
        ("run_arms", "adam,sgd", ("adam", "sgd")),
        ("run_arms", "sgd", ("sgd",)),
        ("run_arms", " ('adam', \"sgd\")", ("adam", "sgd")),
        ("run_arms", "[sgd,]", ("sgd",)),
        ("snapshot_seeds", "", ()),
        ("snapshot_seeds", "()", ()),
        ("snapshot_seeds", "(1, 2)", (1, 2)),
        ("snapshot_seeds", "(1,)", (1,)),
        ("snapshot_seeds", "1,", (1,)),
        ("gradient", "autodiff", "autodiff"),
    ],
)
def test_overrides(field, text, value):
    config = load()
    override(config, field, text)
    found = flatten(config)[field]
    assert found == value
    assert type(found) is type(value)
    check(config)


@pytest.mark.parametrize("text", ["1.5", "ten", "", "nan", "inf", "1e400", "true"])
def test_whole_numbers_must_be_whole(text):
    with pytest.raises(ConfigError, match=r"^steps='.*': must be an integer"):
        override(load(), "steps", text)


@pytest.mark.parametrize(
    ("field", "value", "must"),
    [
        ("seeds", 0, "an integer from 1 to 1000000"),
        ("seeds", True, "an integer from 1 to 1000000"),
        ("steps", -1, "an integer from 1 to 1000000000"),
        ("steps", 10.0, "an integer from 1 to 1000000000"),
        ("eval_every", 0, "an integer from 1 to 1000000000"),
        ("batch_size", 0, "an integer from 1 to 100000"),
        ("seed", -1, "an integer from 0 to 2147483647"),
        ("fresh", 1, "true or false"),
        ("gradient", ["laws"], "one of streaming, laws, autodiff"),
        ("arms", 3, "a group of groups"),
        ("arms.sgd", 3, "a group of fields"),
        ("task.num_symbols", 10**6, "an integer from 2 to 1000"),
        ("gradient", "magic", "one of streaming, laws, autodiff"),
        ("task.stay", 1.2, "a number from 0 to 1"),
        ("task.stay", math.nan, "a number from 0 to 1"),
        ("task.length", 1, "an integer from 2 to 1000000"),
        ("task.name", "stiky", "one of sticky, toy"),
        ("model.d_k", 0, "an integer from 1 to 100000"),
        ("model.init_scale", -0.1, "a number from 0 to 1e+30"),
        ("arms.sgd.learning_rate", -0.1, "a number from 0 to 1e+30"),
        ("arms.values_fast.value_rate", math.nan, "a number from 0 to 1e+30"),
        ("arms.values_fast.value_rate", math.inf, "a number from 0 to 1e+30"),
        ("arms.adam.optimizer", "adamm", "one of sgd, momentum, adam, adamw"),
        ("arms.values_fast.algorithm", "e-m", "one of gradient, two_timescale, em"),
        (
            "run_arms",
            ("sgd", "me"),
            ARMS,
        ),
        ("run_arms", (), "names, separated by commas, none twice"),
        ("run_arms", ("adam", "adam"), "names, separated by commas, none twice"),
        ("baseline", "nobody", "one of run_arms=sgd,values_fast,em_majorised,sgd_10x"),
        ("baseline", "adam", "one of run_arms=sgd,values_fast,em_majorised,sgd_10x"),
        ("arms.sgd.learning_rate", 0.0, "one rate must be above 0"),
        ("arms.sgd.learning_rate", 1e-60, "one rate must be above 0"),
        (
            "snapshot_seeds",
            (-1,),
            "integers from 0, separated by commas, none twice",
        ),
        ("snapshots", 1, "an integer from 2 to 10000"),
        ("arms.sgd.dropout_rate", 1.0, "a number from 0, below 1"),
        ("arms.sgd.value_norm", 1, "true or false"),
    ],
)
def test_wrong_values_are_named_with_what_they_must_be(field, value, must):
    config = load()
    with config.ignore_type(), config.unlocked():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(ConfigError) as error:
        check(config)
    message = str(error.value)
    assert message.startswith(f"{field}=")
    assert "must" in message
    assert message.endswith(must)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("grid.scale", "(0.1, 1)", (0.1, 1.0)),
        ("grid.ratio", "[1]", (1.0,)),
        ("grid.fresh", "(True,)", (True,)),
    ],
)
def test_tuples_of_a_grid_may_be_written_as_such(field, text, value):
    config = load(name="rates")
    override(config, field, text)
    assert flatten(config)[field] == value
    check(config)


@pytest.mark.parametrize("text", ["", "()", " ", "(", "1,,2", "(1", ")("])
def test_what_is_no_list_of_numbers_is_refused(text):
    config = load(name="rates")

    def set_and_check():
        override(config, "grid.scale", text)
        check(config)

    with pytest.raises(ConfigError, match=r"^grid.scale=.*: must be numb"):
        set_and_check()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda p: p.stem)
def test_every_variant_of_every_config_passes_its_check(path):
    for variant in ("", *experiments.load(str(path)).variants):
        experiments.resolve(experiments.load(f"{path}:{variant}").config)


@pytest.mark.parametrize("rate", ["routing_rate", "value_rate", "output_rate"])
def test_a_baseline_moves_if_anything_of_it_does(rate):
    config = load()
    config.baseline = "values_fast"
    every = dict.fromkeys(("routing_rate", "value_rate", "output_rate"), 0.0)
    config.arms.values_fast.update(every)
    with pytest.raises(ConfigError, match="the baseline never moves") as no:
        check(config)
    assert all(f"arms.values_fast.{name}=0.0" in str(no.value) for name in every)
    config.arms.values_fast[rate] = 0.1
    check(config)


def test_an_m_step_in_closed_form_moves_without_a_rate():
    config = load()
    config.baseline = "em_majorised"
    config.arms.em_majorised.update({"routing_rate": 0.0, "output_rate": 0.0})
    check(config)


def test_the_sgd_of_a_grid_must_move():
    config = load(name="rates")
    for name in ("routing_rate", "value_rate", "output_rate"):
        config.arms.two_timescale[name] = 0.0
    with pytest.raises(ConfigError, match="SGD, a part of it, never moves"):
        check(config)


@pytest.mark.parametrize(
    ("name", "command", "said"),
    [
        ("gradients", "train", r"^experiment='proof': .* use jaxattn check, or"),
        ("sticky", "check", r"^experiment='head': .* use jaxattn train, or"),
    ],
)
def test_a_config_of_another_command_names_it(name, command, said):
    with pytest.raises(ConfigError, match=said):
        registry.require_command(load(name=name), command)


@pytest.mark.parametrize("wrong", ["heads", "", 3, ("head",)])
def test_a_config_names_its_kind(wrong):
    config = load()
    with config.ignore_type():
        config.experiment = wrong
    with pytest.raises(ConfigError, match=r"^experiment=.*: must be one of head, grid"):
        check(config)
    del config.experiment
    with pytest.raises(ConfigError, match=r"^experiment=None: must be one of head"):
        check(config)


def test_a_config_is_found_by_name_and_a_file_here_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sticky:smoke", "configs/sticky.py:smoke"):
        assert experiments.load(name).config.name == "sticky-smoke"
    with pytest.raises(ConfigError, match=r"no such file.*'sticky'.*one of b"):
        experiments.load("stiky")
    for name in ("elsewhere/sticky.py", "sticky.py", "../sticky", "README.md", "."):
        with pytest.raises(ConfigError, match="no such file"):
            experiments.load(name)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sticky.py").write_text("def get_config(variant): return 1")
    for name in ("sticky", "configs/sticky.py"):
        with pytest.raises(ConfigError, match="returned a int"):
            experiments.load(name)


def test_an_unknown_field_names_three_and_no_more():
    with pytest.raises(ConfigError) as error:
        override(load(), "sedes", "3")
    assert str(error.value) == (
        "sedes='3': no such field, did you mean 'seeds', 'seed' or 'steps'? (--list"
        " shows all)"
    )
    with pytest.raises(ConfigError) as error:
        override(load(), "arms", "3")
    assert len(str(error.value)) < 150
    config = load()
    config.learning_rate = 0.1
    with pytest.raises(ConfigError) as error:
        check(config)
    assert len(str(error.value)) < 200


def test_unknown_fields_suggest_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'seeds'"):
        override(load(), "sedes", "3")
    with pytest.raises(ConfigError, match=r"did you mean 'task\.stay'"):
        override(load(), "task.stey", "0.3")
    with pytest.raises(ConfigError, match=r"names a group; set one of model"):
        override(load(), "model", "3")


def test_unknown_and_missing_fields_of_a_file():
    config = load()
    config.stepps = 3
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        check(config)
    config = load()
    del config.task.stay
    with pytest.raises(ConfigError, match=r"^task.stay: missing"):
        check(config)
    config = load()
    config.arms.sgd.momentum = 0.9
    with pytest.raises(
        ConfigError, match="no such field with algorithm 'gradient', opt"
    ):
        check(config)
    config = load()
    del config.arms.values_fast.value_rate
    with pytest.raises(ConfigError, match=r"^arms.values_fast.value_rate=None"):
        check(config)


def test_type_follows_the_field_not_the_value_in_the_file():
    config = load()
    with config.ignore_type():
        config.task.stay = 1
        config.arms.sgd.learning_rate = 1
    override(config, "task.stay", "0.3")
    override(config, "arms.sgd.learning_rate", "0.5")
    assert (config.task.stay, config.arms.sgd.learning_rate) == (0.3, 0.5)
    check(config)


def test_the_name_follows_from_the_file():
    with pytest.raises(ConfigError, match="no such field"):
        override(load(), "name", "..")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def get_config(", "SyntaxError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("", "AttributeError"),
        ("def get_config(variant): return {}", "returned a dict"),
        ("def get_config(variant): return 1 / 0", "division by zero"),
    ],
)
def test_a_config_file_that_fails(tmp_path, text, said):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        experiments.load(str(path))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_variant_and_missing_file():
    with pytest.raises(ConfigError, match=r"did you mean 'smoke'.*parity"):
        load("smokee")
    with pytest.raises(ConfigError, match="no such file"):
        experiments.load("configs/nothing.py")


def test_a_program_leaves_the_numbers_out():
    config = load()
    config.run_arms = ("sgd", "sgd_10x", "adam")
    sgd, fast, adam = experiments.resolve(config).arms
    assert sgd.program == fast.program != adam.program
    assert sgd.rates != fast.rates


def test_an_arm_may_be_wired_otherwise_unless_it_holds_attention():
    config = load()
    override(config, "arms.sgd.dropout_rate", "0.25")
    override(config, "arms.sgd.value_norm", "true")
    check(config)
    for arm, wiring in zip(experiments.resolve(config).arms, WIRED, strict=False):
        assert dict(arm.program[1:]).items() >= wiring.items()
    with pytest.raises(ConfigError, match="no such field"):
        override(config, "arms.em_majorised.dropout_rate", "0.25")
    with config.unlocked():
        config.arms.em_majorised.dropout_rate = 0.25
    with pytest.raises(ConfigError, match="no such field with algorithm 'em'"):
        check(config)


def test_each_task_has_fields_of_its_own():
    config = load(name="toy")
    check(config)
    with config.unlocked():
        config.task.stay = 0.3
    with pytest.raises(ConfigError, match=r"task.stay=0.3: no such field"):
        check(config)
    del config.task.stay, config.task.num_classes
    with pytest.raises(ConfigError, match=r"task.num_classes: missing"):
        check(config)


@pytest.mark.parametrize(("field", "value"), [("fresh", True), ("batch_size", 2)])
def test_the_toy_is_of_one_sequence(field, value):
    config = load(name="toy")
    config[field] = value
    with pytest.raises(ConfigError, match=f"{field}={value}: must be"):
        check(config)


def test_names_of_arms_fit_a_table():
    config = load()
    with config.unlocked():
        config.arms["a|b"] = config.arms.sgd
    with pytest.raises(ConfigError, match=r"arms='a\|b': must have letters"):
        check(config)


def test_a_proof_has_no_other_wiring():
    config = load(name="gradients")
    check(config)
    arm = next(iter(config.arms))
    with config.unlocked():
        config.arms[arm].value_norm = True
    with pytest.raises(ConfigError, match="value_norm=True: no such field"):
        check(config)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seeds", "np.int64(3)", r"seeds=.*3.*: has a int64; must be Python's own"),
        ("arms.sgd.optimizer", "[]", r"arms.sgd.optimizer=\[\]: must be one of"),
        ("arms.sgd.optimizer", "ConfigDict({'a': 1})", r"arms.sgd.optimizer"),
        ("arms.sgd.algorithm", "np.zeros((2, 2))", r"has a ndarray"),
        ("arms", "3", "arms=3: must be a group"),
        ("arms.sgd", "(1, 2)", r"arms.sgd=\(1, 2\): must be a group of fields"),
        ("model", "None", "model=None: has a NoneType"),
        ("task", "'sticky'", "task='sticky': no such field"),
        ("run_arms", "('sgd', len)", "run_arms=.*: has a builtin_function"),
        ("seeds", "required_placeholder(int)", "config: None value found in required"),
    ],
)
def test_whatever_a_file_gives_is_one_line(tmp_path, field, value, said):
    path = tmp_path / "own.py"
    path.write_text(
        "import numpy as np\n"
        "from ml_collections import ConfigDict\n"
        "from ml_collections.config_dict import required_placeholder\n"
        "from jaxattn import experiments\n"
        "def get_config(variant):\n"
        f"    found = experiments.load({str(CONFIGS / 'sticky.py')!r}).config\n"
        "    with found.ignore_type(), found.unlocked():\n"
        "        *groups, name = " + repr(field) + ".split('.')\n"
        "        group = found\n"
        "        for part in groups:\n"
        "            group = group[part]\n"
        "        with group.ignore_type():\n"
        f"            group[name] = {value}\n"
        "    return found\n"
    )

    def use():
        config = experiments.load(str(path)).config
        override(config, "steps", "5")
        check(config)

    with pytest.raises(ConfigError, match=said) as error:
        use()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["3", "None", "{'a': 3}"])
def test_a_name_of_any_type_is_that_of_the_file(tmp_path, name):
    path = tmp_path / "own.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(variant):\n"
        f"    return ConfigDict({{'name': {name}}}).lock()\n"
    )
    assert experiments.load(str(path)).config.name == "own"


def test_heads_of_the_proof_are_dense_and_small():
    config = load(name="gradients")
    config.task.length = 10**6
    with pytest.raises(ConfigError, match=r"task.length=1000000: .*2000$"):
        check(config)
