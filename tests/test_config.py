"""Configs: what is accepted, and what is said of the rest."""

import math
from pathlib import Path

import pytest

from jaxattn import config as config_lib
from jaxattn import schedules

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
        ("run_arms", "em", ("em",)),
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
        (
            "baseline",
            "nobody",
            f"one of {ARMS}",
        ),
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
