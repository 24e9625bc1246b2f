"""A task, an algorithm, a measure, a claim and an arm from one file: this one.

Nothing of the package knows of them. The second test does the same from a config file
of a user's own, by the command.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxattn import engine, experiments, runs, views
from jaxattn.algorithms import Algorithm, AlgorithmSpec, Info, State, over_sequences
from jaxattn.cli import command, train
from jaxattn.fields import RATE, integer, number
from jaxattn.measures.base import Measure
from jaxattn.tasks import Batch, Task, TaskSpec
from jaxattn.views import publish

# --- a task: which of two signs is hidden in noise, asked for at every position


def hidden_sign(*, length: int, noise: float) -> Task:
    """x_t = (s + noise n_t, 1), y_t = s > 0; p(s = 1 | x_1..x_t) is a logistic sum."""

    def sample(key: jax.Array) -> Batch:
        sign_key, noise_key = jax.random.split(key)
        label = jax.random.bernoulli(sign_key).astype(jnp.int32)
        sign = jnp.where(label > 0, 1.0, -1.0)
        seen = sign + noise * jax.random.normal(noise_key, (length,))
        inputs = jnp.stack([seen, jnp.ones_like(seen)], axis=1)
        return Batch(inputs, jnp.full((length,), label))

    def bayes(batch: Batch) -> jax.Array:
        log_odds = 2 * jnp.cumsum(batch.inputs[:, 0]) / noise**2
        return jax.nn.log_sigmoid(jnp.stack([-log_odds, log_odds], axis=1))

    return Task(sample, bayes)


TASKS = {
    "hidden_sign": TaskSpec(
        build=lambda fields, _: hidden_sign(
            length=fields["length"], noise=fields["noise"]
        ),
        fields={
            "length": integer(2, 1000),
            "noise": number(0.01, 100),
            "d_x": integer(2, 2),
        },
        positions=lambda fields: fields["length"],
        num_classes=lambda fields: 2,
    )
}

# --- an algorithm: every weight moves by the sign of its gradient


def _sign_descent(arm, rates, model) -> Algorithm:
    gradient = over_sequences(model.loss_and_gradient)

    def init(params) -> State:
        return State(params, ())

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Info]:
        loss, slopes = gradient(state.params, batch, key)
        moved = jax.tree.map(
            lambda w, g: w - rates["learning_rate"] * jnp.sign(g), state.params, slopes
        )
        return State(moved, ()), Info(loss)

    return Algorithm(init, step)


ALGORITHMS = {
    "sign_descent": AlgorithmSpec(
        about="every weight moves by the sign of its gradient",
        rates=lambda arm: {"learning_rate": RATE},
        head=_sign_descent,
    )
}

# --- a measure: how much the last query attends to evidence of the right sign


def _right_sign(observed, key) -> jax.Array:
    weight, seen = observed.output.weight[-1], observed.batch.inputs[:, 0]
    sign = jnp.where(observed.batch.targets[0] > 0, 1.0, -1.0)
    return jnp.sum(jnp.where(seen * sign > 0, weight, 0))


def _any_sign(observed, key) -> jax.Array:
    shuffled = jax.random.permutation(key, observed.output.weight[-1])
    output = observed.output._replace(weight=shuffled[None])
    return _right_sign(observed._replace(output=output), key)


MEASURES = {
    "right_sign": Measure(
        about="attention to evidence of the right sign",
        of=_right_sign,
        null=_any_sign,
        unit="share",
    )
}

# --- a config with an arm and a claim of its own


def get_config(variant: str = "") -> ConfigDict:
    """Two arms, one of them by the algorithm above."""
    return ConfigDict(
        {
            "experiment": "head",
            "seeds": 3,
            "seed": 0,
            "steps": 30,
            "eval_every": 10,
            "batch_size": 2,
            "fresh": True,
            "gradient": "laws",
            "snapshot_seeds": (),
            "snapshots": 2,
            "snapshot_length": 8,
            "diagnostics_length": 16,
            "measures": ("right_sign",),
            "model": {"d_k": 2, "d_v": 2, "init_scale": 0.1, "bias": False},
            "task": {"name": "hidden_sign", "length": 16, "noise": 2.0, "d_x": 2},
            "arms": {
                "sgd": {
                    "algorithm": "gradient",
                    "optimizer": "sgd",
                    "learning_rate": 0.01,
                },
                "signs": {"algorithm": "sign_descent", "learning_rate": 0.02},
            },
            "claims": {
                "signs": {
                    "text": "signs beat slopes",
                    "arm": "signs",
                    "baseline": "sgd",
                    "metric": "heldout_kl",
                    "direction": "less",
                },
            },
            "run_arms": ("sgd", "signs"),
            "baseline": "sgd",
        }
    )


def test_bayes_of_the_task_is_brute_force():
    task = hidden_sign(length=5, noise=1.5)
    batch = task.sample(jax.random.key(3))
    x = np.asarray(batch.inputs[:, 0], float)
    likelihood = np.array(
        [np.cumprod(np.exp(-((x - sign) ** 2) / 2 / 1.5**2)) for sign in (-1, 1)]
    )
    expected = np.log(likelihood / likelihood.sum(axis=0)).T
    np.testing.assert_allclose(task.bayes(batch), expected, rtol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The Python way: build an Experiment, train it, look at the run."""
    config = get_config()
    config.name = "signs"
    catalogue = experiments.Catalogue().extended(TASKS, ALGORITHMS, MEASURES)
    experiment = experiments.resolve(config, catalogue)
    workdir = tmp_path_factory.mktemp("signs")
    return engine.train(experiment, workdir=workdir, finish=publish.tables)


def test_the_run_is_labelled(run):
    kl = run.heldout_kl
    assert kl.dims == ("arm", "seed", "step")
    assert kl.attrs["units"] == "nats"
    assert run.right_sign.attrs["units"] == "share"
    assert run.step.values.tolist() == [0, 10, 20, 30]
    fell = kl.sel(arm="signs", step=0) - kl.sel(arm="signs", step=30)
    assert (fell > 0.01).all()
    assert np.isfinite(run.right_sign_null).all()


def test_it_gets_a_table_a_verdict_and_a_picture(run):
    folder = run.attrs["path"]
    summary = runs.load_finished(folder).attrs["summary"]
    (claim,) = summary["claims"]
    ends = run.heldout_kl.sel(step=30)
    difference = (ends.sel(arm="signs") - ends.sel(arm="sgd")).mean()
    assert claim["paired_difference"]["mean"] == pytest.approx(float(difference))
    assert claim["verdict"] in ("held", "undecided")
    own = summary["arms"]["signs"]["measures"]["right_sign"]
    assert own["end"]["mean"] == pytest.approx(
        float(run.right_sign.sel(arm="signs", step=30).mean()), rel=1e-5
    )
    assert own["differs"] in ("above", "below", "undecided")
    text = views.view_of(run).terminal(summary)
    assert "signs beat slopes" in text
    assert "right_sign, signs" in text
    drawn = [path.name for path in publish.draw(folder)]
    assert "measures.png" in drawn
    report = (publish.Path(folder) / "report.md").read_text()
    assert "attention to evidence of the right sign, share" in report
    assert "figures/measures.png" in report


def test_a_config_file_of_a_user_brings_its_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text(publish.Path(__file__).read_text())
    monkeypatch.chdir(tmp_path)
    line = ["jaxattn train", "--config=mine", "--nofigures", "--nocache"]
    line += ["--config.steps=10", "--config.arms.signs.learning_rate=0.05"]
    assert command.run(train.COMMAND, line) == 0
    assert "right_sign, signs" in capsys.readouterr().out
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["steps"] == 10
    assert command.run(train.COMMAND, [*line, "--list"]) == 0
    assert "sign_descent" in capsys.readouterr().out
    assert command.run(train.COMMAND, [*line, "--config.task.noise=0"]) == 2
    assert (
        "task.noise=0.0: must be a number from 0.01 to 100" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tasks": {"sticky": TASKS["hidden_sign"]}}, "TASKS['sticky']: must have ano"),
        ({"algorithms": {"mine": 3}}, "ALGORITHMS['mine']: must be a AlgorithmSpec"),
        ({"measures": [1]}, "MEASURES=[1]: must be a mapping from name to Measure"),
    ],
)
def test_what_a_file_brings_is_checked(wrong, said):
    with pytest.raises(experiments.ConfigError) as error:
        experiments.Catalogue().extended(**wrong)
    assert str(error.value).startswith(said)
