"""Configs: what is accepted, and what is said of the rest."""

import math
from pathlib import Path

import pytest

from jaxattn.algorithms import schedules
from jaxattn.experiments import config as config_lib

CONFIGS = Path(__file__).parents[1] / "configs"

ARMS = (
    "adam, em, em_majorised, em_prototype, frozen_values, momentum, output_fast,"
    " random_frame, routing_fast, sgd, sgd_matched"
)


def load(variant=""):
    return config_lib.load(f"{CONFIGS / 'sticky.py'}{variant and ':' + variant}")


@pytest.mark.parametrize("variant", ["", "smoke", "parity"])
def test_variants_are_right_as_they_come(variant):
    config = load(variant)
    config_lib.check(config)
    assert config.name == ("sticky-" + variant if variant else "sticky")


def test_parity_is_the_script_s_protocol():
    config = load("parity")
    assert (config.seeds, config.steps, config.run_arms) == (5, 1000, ("sgd", "em"))
    assert config.task.stay == pytest.approx(0.349802, abs=5e-7)
    assert config_lib.rates(config.arms.sgd) == {"learning_rate": 0.01}
    assert config_lib.rates(config.arms.em) == {
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
        ("run_arms", "em,sgd", ("em", "sgd")),
        ("run_arms", "sgd", ("sgd",)),
        ("run_arms", " ('em', \"sgd\")", ("em", "sgd")),
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
    config_lib.override(config, field, text)
    found = config_lib.flatten(config)[field]
    assert found == value
    assert type(found) is type(value)
    config_lib.check(config)


@pytest.mark.parametrize("text", ["1.5", "ten", "", "nan", "inf", "1e400", "true"])
def test_whole_numbers_must_be_whole(text):
    with pytest.raises(config_lib.ConfigError, match=r"^steps='.*': allowed: a whole"):
        config_lib.override(load(), "steps", text)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("seeds", 0, "a whole number from 1 to 1000000"),
        ("steps", -1, "a whole number from 1 to 1000000000"),
        ("steps", 10.0, "a whole number from 1 to 1000000000"),
        ("eval_every", 0, "a whole number from 1 to 1000000000"),
        ("batch_size", 0, "a whole number from 1 to 100000"),
        ("seed", -1, "a whole number from 0 to 2147483647"),
        ("fresh", 1, "true or false"),
        ("gradient", ["laws"], "one of streaming, laws, autodiff"),
        ("arms", 3, "a group with a group for each arm"),
        ("arms.sgd", 3, "a group of fields"),
        ("task.num_symbols", 10**6, "a whole number from 2 to 1000"),
        ("gradient", "magic", "one of streaming, laws, autodiff"),
        ("task.stay", 1.2, "a number from 0 to 1"),
        ("task.stay", math.nan, "a number from 0 to 1"),
        ("task.length", 1, "a whole number from 2 to 1000000"),
        ("task.name", "stiky", "one of sticky, toy"),
        ("model.d_k", 0, "a whole number from 1 to 100000"),
        ("model.init_scale", -0.1, "a number from 0 to 1e+30"),
        ("arms.sgd.learning_rate", -0.1, "a number from 0 to 1e+30"),
        ("arms.em.value_rate", math.nan, "a number from 0 to 1e+30"),
        ("arms.em.value_rate", math.inf, "a number from 0 to 1e+30"),
        ("arms.adam.optimizer", "adamm", "one of sgd, momentum, adam, adamw"),
        ("arms.em.schedule", "e-m", "one of gradient, two_timescale, em"),
        (
            "run_arms",
            ("sgd", "me"),
            ARMS,
        ),
        ("run_arms", (), "names, separated by commas, none twice"),
        ("run_arms", ("em", "em"), "names, separated by commas, none twice"),
        ("baseline", "nobody", "one of run_arms=sgd,em,em_majorised,sgd_matched"),
        ("baseline", "adam", "one of run_arms=sgd,em,em_majorised,sgd_matched"),
        ("arms.sgd.learning_rate", 0.0, "a rate above 0"),
        ("arms.sgd.learning_rate", 1e-60, "a rate above 0"),
        (
            "snapshot_seeds",
            (-1,),
            "whole numbers from 0, separated by commas, none twice",
        ),
        ("snapshots", 1, "a whole number from 2 to 10000"),
        ("arms.sgd.dropout_rate", 1.0, "a number from 0, below 1"),
        ("arms.sgd.value_norm", 1, "true or false"),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(field, value, allowed):
    config = load()
    with config.ignore_type(), config.unlocked():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.check(config)
    message = str(error.value)
    assert message.startswith(f"{field}=")
    assert message.endswith(f"allowed: {allowed}")
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
    config = config_lib.load(str(CONFIGS / "rates.py"))
    config_lib.override(config, field, text)
    assert config_lib.flatten(config)[field] == value
    config_lib.check(config)


@pytest.mark.parametrize("text", ["", "()", " ", "(", "1,,2", "(1", ")("])
def test_what_is_no_list_of_numbers_is_refused(text):
    config = config_lib.load(str(CONFIGS / "rates.py"))

    def set_and_check():
        config_lib.override(config, "grid.scale", text)
        config_lib.check(config)

    with pytest.raises(config_lib.ConfigError, match=r"^grid.scale=.*: allowed: numb"):
        set_and_check()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda p: p.stem)
def test_every_variant_of_every_config_passes_its_check(path):
    config, module = config_lib.load_with_module(str(path))
    for variant in ("", *module.VARIANTS):
        config = config_lib.load(f"{path}:{variant}")
        proof = config_lib.is_proof(config)
        (config_lib.check_proof if proof else config_lib.check)(config)


@pytest.mark.parametrize("rate", ["routing_rate", "value_rate", "output_rate"])
def test_a_baseline_moves_if_anything_of_it_does(rate):
    config = load()
    config.baseline = "em"
    every = dict.fromkeys(("routing_rate", "value_rate", "output_rate"), 0.0)
    config.arms.em.update(every)
    with pytest.raises(config_lib.ConfigError, match="the baseline never moves") as no:
        config_lib.check(config)
    assert all(f"arms.em.{name}=0.0" in str(no.value) for name in every)
    config.arms.em[rate] = 0.1
    config_lib.check(config)


def test_an_m_step_in_closed_form_moves_without_a_rate():
    config = load()
    config.baseline = "em_majorised"
    config.arms.em_majorised.update({"routing_rate": 0.0, "output_rate": 0.0})
    config_lib.check(config)


def test_the_sgd_of_a_grid_must_move():
    config = config_lib.load(str(CONFIGS / "rates.py"))
    for name in ("routing_rate", "value_rate", "output_rate"):
        config.arms.two_timescale[name] = 0.0
    with pytest.raises(config_lib.ConfigError, match="SGD, a part of it, never moves"):
        config_lib.check(config)


@pytest.mark.parametrize(
    ("name", "proof", "said"),
    [
        ("gradients", False, r"^config='gradients': is for the proof .* jaxattn check"),
        ("sticky", True, r"^config='sticky': is for training; allowed: jaxattn train"),
    ],
)
def test_a_config_of_another_command_names_it(name, proof, said):
    config = config_lib.load(str(CONFIGS / f"{name}.py"))
    with pytest.raises(config_lib.ConfigError, match=said):
        (config_lib.check_proof if proof else config_lib.check)(config)


def test_a_config_is_found_by_name_and_a_file_here_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sticky:smoke", "configs/sticky.py:smoke"):
        assert config_lib.load(name).name == "sticky-smoke"
    with pytest.raises(
        config_lib.ConfigError, match=r"no such file.*'sticky'.*one of b"
    ):
        config_lib.load("stiky")
    for name in ("elsewhere/sticky.py", "sticky.py", "../sticky", "README.md", "."):
        with pytest.raises(config_lib.ConfigError, match="no such file"):
            config_lib.load(name)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sticky.py").write_text("def get_config(variant): return 1")
    for name in ("sticky", "configs/sticky.py"):
        with pytest.raises(config_lib.ConfigError, match="gave a int"):
            config_lib.load(name)


def test_an_unknown_field_names_three_and_no_more():
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.override(load(), "sedes", "3")
    assert str(error.value) == (
        "sedes='3': no such field, did you mean 'seeds', 'seed' or 'steps'? (--list"
        " shows all)"
    )
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.override(load(), "arms", "3")
    assert len(str(error.value)) < 150
    config = load()
    config.learning_rate = 0.1
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.check(config)
    assert len(str(error.value)) < 200


def test_unknown_fields_suggest_the_nearest():
    with pytest.raises(config_lib.ConfigError, match="did you mean 'seeds'"):
        config_lib.override(load(), "sedes", "3")
    with pytest.raises(config_lib.ConfigError, match=r"did you mean 'task\.stay'"):
        config_lib.override(load(), "task.stey", "0.3")
    with pytest.raises(
        config_lib.ConfigError, match=r"a group; allowed: to set one of model"
    ):
        config_lib.override(load(), "model", "3")


def test_unknown_and_missing_fields_of_a_file():
    config = load()
    config.stepps = 3
    with pytest.raises(config_lib.ConfigError, match="did you mean 'steps'"):
        config_lib.check(config)
    config = load()
    del config.task.stay
    with pytest.raises(config_lib.ConfigError, match=r"^task.stay: missing"):
        config_lib.check(config)
    config = load()
    config.arms.sgd.momentum = 0.9
    with pytest.raises(config_lib.ConfigError, match="no such field for schedule"):
        config_lib.check(config)
    config = load()
    del config.arms.em.value_rate
    with pytest.raises(config_lib.ConfigError, match=r"^arms.em.value_rate=None"):
        config_lib.check(config)


def test_type_follows_the_field_not_the_value_in_the_file():
    config = load()
    with config.ignore_type():
        config.task.stay = 1
        config.arms.sgd.learning_rate = 1
    config_lib.override(config, "task.stay", "0.3")
    config_lib.override(config, "arms.sgd.learning_rate", "0.5")
    assert (config.task.stay, config.arms.sgd.learning_rate) == (0.3, 0.5)
    config_lib.check(config)


def test_the_name_follows_from_the_file():
    with pytest.raises(config_lib.ConfigError, match="no such field"):
        config_lib.override(load(), "name", "..")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def get_config(", "SyntaxError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("", "AttributeError"),
        ("def get_config(variant): return {}", "gave a dict"),
        ("def get_config(variant): return 1 / 0", "division by zero"),
    ],
)
def test_a_config_file_that_fails(tmp_path, text, said):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.load(str(path))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_variant_and_missing_file():
    with pytest.raises(config_lib.ConfigError, match=r"did you mean 'smoke'.*parity"):
        load("smokee")
    with pytest.raises(config_lib.ConfigError, match="no such file"):
        config_lib.load("configs/nothing.py")


def test_structure_leaves_the_numbers_out():
    arms = load().arms
    assert config_lib.structure(arms.sgd) == config_lib.structure(arms.sgd_matched)
    assert config_lib.structure(arms.em) == schedules.Structure("two_timescale")


def test_an_arm_may_be_wired_otherwise_unless_it_holds_attention():
    config = load()
    config_lib.override(config, "arms.sgd.dropout_rate", "0.25")
    config_lib.override(config, "arms.sgd.value_norm", "true")
    config_lib.check(config)
    for arm, wiring in (("sgd", (True, 0.25)), ("em", (False, 0.0))):
        found = config_lib.structure(config.arms[arm])
        assert (found.value_norm, found.dropout_rate) == wiring
    with pytest.raises(config_lib.ConfigError, match="no such field"):
        config_lib.override(config, "arms.em_majorised.dropout_rate", "0.25")
    with config.unlocked():
        config.arms.em_majorised.dropout_rate = 0.25
    with pytest.raises(config_lib.ConfigError, match="no such field for schedule 'em'"):
        config_lib.check(config)


def test_each_task_has_fields_of_its_own():
    config = config_lib.load(str(CONFIGS / "toy.py"))
    config_lib.check(config)
    with config.unlocked():
        config.task.stay = 0.3
    with pytest.raises(config_lib.ConfigError, match=r"task.stay=0.3: no such field"):
        config_lib.check(config)
    del config.task.stay, config.task.num_classes
    with pytest.raises(config_lib.ConfigError, match=r"task.num_classes: missing"):
        config_lib.check(config)


@pytest.mark.parametrize(("field", "value"), [("fresh", True), ("batch_size", 2)])
def test_the_toy_is_of_one_sequence(field, value):
    config = config_lib.load(str(CONFIGS / "toy.py"))
    config[field] = value
    with pytest.raises(config_lib.ConfigError, match=f"{field}={value}: allowed with"):
        config_lib.check(config)


def test_names_of_arms_fit_a_table():
    config = load()
    with config.unlocked():
        config.arms["a|b"] = config.arms.sgd
    with pytest.raises(config_lib.ConfigError, match=r"arms='a\|b': allowed: letters"):
        config_lib.check(config)


def test_a_proof_has_no_other_wiring():
    config = config_lib.load(str(CONFIGS / "gradients.py"))
    config_lib.check_proof(config)
    arm = next(iter(config.arms))
    with config.unlocked():
        config.arms[arm].value_norm = True
    with pytest.raises(config_lib.ConfigError, match="value_norm=True: no such field"):
        config_lib.check_proof(config)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seeds", "np.int64(3)", r"seeds=.*3.*: has a int64; allowed: Python's own"),
        ("arms.sgd.optimizer", "[]", r"arms.sgd.optimizer=\[\]: allowed: one of"),
        ("arms.sgd.optimizer", "ConfigDict({'a': 1})", r"arms.sgd.optimizer"),
        ("arms.sgd.schedule", "np.zeros((2, 2))", r"has a ndarray"),
        ("arms", "3", "arms=3: allowed: a group"),
        ("arms.sgd", "(1, 2)", r"arms.sgd=\(1, 2\): allowed: a group of fields"),
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
        "from jaxattn.experiments import config\n"
        "def get_config(variant):\n"
        f"    found = config.load({str(CONFIGS / 'sticky.py')!r})\n"
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
        config = config_lib.load(str(path))
        config_lib.override(config, "steps", "5")
        config_lib.check(config)

    with pytest.raises(config_lib.ConfigError, match=said) as error:
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
    assert config_lib.load(str(path)).name == "own"


def test_heads_of_the_proof_are_dense_and_small():
    config = config_lib.load(str(CONFIGS / "gradients.py"))
    config.task.length = 10**6
    with pytest.raises(config_lib.ConfigError, match=r"task.length=1000000: .*2000$"):
        config_lib.check_proof(config)
