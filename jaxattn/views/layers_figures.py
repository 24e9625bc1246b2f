"""Pictures of a run of transformers, drawn from its directory alone."""

import math
from pathlib import Path

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxattn.analysis import entries, layer_curves, stats
from jaxattn.runs import Run
from jaxattn.views import figures, head_figures
from jaxattn.views.figures import Band, Picture


def draw(run: Run, folder: Path, *, pdf: bool = False) -> dict[str, str]:
    """Draws every picture of a run.

    Args:
      run: with its summary.
      folder: to write to; made if it is not there.
      pdf: also as vector graphics.

    Returns:
      Name of each file -> its caption.
    """
    arm, caught = _shown(run), layer_curves.finite_alone(run)
    first = None if arm is None else _first(caught)
    pictures = {
        "curves": Picture(
            _curves,
            "Distance to exact Bayes, loss and accuracy on held-out sequences while"
            " training: a line is the mean over seeds, its shade the 95 % interval.",
        ),
        "positions": Picture(
            _positions,
            "Where on a sequence each arm is how far from the exact posterior, at the"
            " end; means over sequences and seeds, shaded the 95 % interval over seeds."
            " Entropy can be right where the posterior is wrong.",
        ),
        "calibration": Picture(
            _calibration,
            "What exact Bayes says, on average, where the model says p, for the share"
            " of (position, class) pairs that a dot's size shows; on the diagonal a"
            " model is calibrated, which it can be without knowing anything.",
        ),
    }
    if "long_kl_bits" in run:
        pictures["longer"] = Picture(
            _longer,
            "Distance to exact Bayes on sequences longer than any it was trained on,"
            " which end at the dotted line, if longer is asked for too.",
        )
    if first is not None:
        seed = run["seed"].values[first]
        pictures |= {
            "heads": Picture(
                _heads,
                f"What each head of {arm} does while it trains, a layer's heads in one"
                " colour, means over seeds: how widely it attends (1: equal shares),"
                " routing pressure (what the loss asks of its attention), how"
                " orthogonal its keys are (dashed: random keys), and how far its"
                " attention is from its end.",
            ),
            "geometry": Picture(
                _geometry,
                f"Geometry of {arm} by layer, at the end and beside its nulls: pale"
                " dots are seeds, strong ones means with their 95 % intervals.",
            ),
            "manifold": Picture(
                _manifold,
                f"Contexts that each layer's values deliver at scored positions, along"
                f" their two principal axes, coloured by posterior entropy; {arm}, seed"
                f" {seed}.",
            ),
            "ablation": Picture(
                _ablation,
                f"KL to Bayes of {arm} with one part replaced by its mean: pale dots"
                " are seeds, strong ones geometric means; dashed: with all in place.",
            ),
            "attention": Picture(
                _attention,
                f"Attention of every head of {arm} at the end, mean over sequences;"
                f" seed {seed}. Queries go down, sources to the right; a row adds up"
                " to 1.",
            ),
            "frame": Picture(
                lambda run: head_figures.frame(layer_curves.settling(_attending(run))),
                "The share of their total change that attention (the frame; mean over"
                " heads) and KL to Bayes (precision, from that of knowing nothing)"
                " still have to make: the lower line is ahead; dots mark 50 %, median"
                " over seeds. The root of KL is, like the drift of attention, on the"
                " scale of a distance.",
            ),
        }
    return figures.save(pictures, caught, folder, pdf=pdf)


def _first(run: Run) -> int | None:
    """Place of the first seed of the shown arm that did not diverge."""
    finite = np.isfinite(run["heldout_kl_bits"].values[_row(run), :, -1])
    return int(finite.argmax()) if finite.any() else None


def _shown(run: Run) -> str | None:
    """The arm that is shown: the baseline, or the first with attention."""
    config = run.attrs["config"]
    arms = [
        arm
        for row, arm in enumerate(config["run_arms"])
        if layer_curves.attends(run, row)
    ]
    return config["baseline"] if config["baseline"] in arms else next(iter(arms), None)


def _row(run: Run) -> int:
    return run.attrs["config"]["run_arms"].index(_shown(run))


def _attending(run: Run) -> Run:
    """Selects the arms that have attention."""
    config = run.attrs["config"]
    rows = [
        row for row in range(len(config["run_arms"])) if layer_curves.attends(run, row)
    ]
    arms = [config["run_arms"][row] for row in rows]
    return run.isel(arm=rows).assign_attrs(config=config | {"run_arms": arms})


# --- all arms


def _curves(run: Run) -> Figure:
    shown = {
        "heldout_kl_bits": ("Distance to Bayes", "KL(Bayes ‖ model), bits", None),
        "heldout_loss": (
            "Held-out loss",
            "nats per position",
            run.attrs["summary"]["floors"]["bayes_heldout_nll"]["mean"],
        ),
        "accuracy": ("Accuracy", "share right", entries.bayes_floors(run)["accuracy"]),
    }
    figure, axes = figures.panels(3, 3.1, 2.5, most=3, share=False)
    for axis, (metric, (title, unit, floor)) in zip(axes, shown.items(), strict=True):
        head_figures.lines(axis, run, metric)
        figures.floor(axis, floor, "exact Bayes")
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.set_xlabel("step")
    figures.log_if_wide(axes[0], "y", run["heldout_kl_bits"].values)
    figures.legend(figure, axes[1], head_figures.of_seeds(run))
    return figure


def position_data(run: Run, name: str) -> dict[str, Band]:
    """A metric by position at the end, over seeds, by arm.

    Args:
      run: its metrics.
      name: such as "position_kl_bits", or a trait by position.
    """
    values = run[name].values
    values = values[:, :, -1] if "step" in run[name].dims else values
    return {
        arm: figures.band(values[row])
        for row, arm in enumerate(run.attrs["config"]["run_arms"])
    }


def _positions(run: Run) -> Figure:
    shown = {
        "position_kl_bits": ("Distance to Bayes", "KL, bits"),
        "position_total_variation": ("Total variation", "share"),
        "position_entropy_error_bits": ("Entropy error", "mean |H - H(Bayes)|, bits"),
    }
    where = entries.task_of(run)["position_name"]
    figure, axes = figures.panels(3, 3.1, 2.5, most=3, share=False)
    for axis, (metric, (title, unit)) in zip(axes, shown.items(), strict=True):
        _by_position(axis, run, metric)
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.set_xlabel(where)
    figures.legend(figure, axes[0], head_figures.of_seeds(run))
    return figure


def _by_position(axis: Axes, run: Run, metric: str) -> None:
    data = position_data(run, metric)
    for (arm, band), colour in zip(
        data.items(), figures.colours(list(data)), strict=True
    ):
        # The first position is number 1, as in the paper's log2(V - k + 1).
        place = np.arange(1, len(band.middle) + 1)
        style = {"color": colour, "label": arm, "marker": "o", "markersize": 3}
        low = np.maximum(band.low, 0)  # of a mean that is never below
        figures.shade(axis, place, band._replace(low=low), **style)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    # A log scale has no room for intervals that reach 0.
    middles = np.array([band.middle for band in data.values()])
    figures.log_if_wide(axis, "y", middles)
    if axis.get_yscale() == "log":
        axis.set_ylim(bottom=np.nanmin(middles) / 3)


def _longer(run: Run) -> Figure:
    where = entries.task_of(run)["position_name"]
    figure, (axis,) = figures.panels(1, 5.5, 2.7)
    _by_position(axis, run, "long_kl_bits")
    trained = entries.task_of(run)["scored"]
    if run["long_kl_bits"].values.shape[2] > trained:
        axis.axvline(trained, color="0.35", linestyle=":", linewidth=1.2)
    axis.set_ylabel("KL(Bayes ‖ model), bits")
    axis.set_xlabel(where)
    figures.legend(figure, axis, head_figures.of_seeds(run))
    return figure


def _calibration(run: Run) -> Figure:
    arms = run.attrs["config"]["run_arms"]
    figure, axes = figures.panels(len(arms), 1.9, 1.9)
    names = ("predicted", "exact", "share")
    for row, (axis, colour) in enumerate(zip(axes, figures.colours(arms), strict=True)):
        predicted, exact, share = (
            run[f"calibration_{name}"].values[row] for name in names
        )
        axis.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
        axis.scatter(
            predicted, exact, s=4 + 120 * share, color=colour, alpha=0.5, linewidth=0
        )
        axis.set_title(arms[row])
        axis.set_aspect("equal")
    axes[0].set_xlim(-0.03, 1.03)
    axes[0].set_ylim(-0.03, 1.03)
    figures.name_axes(axes, "model's p", "exact Bayes")
    return figure


# --- one arm, by layer and head


def _heads(run: Run) -> Figure:
    shown = {
        "relative_entropy": "entropy of attention",
        "routing_pressure": "routing pressure, Σ a A²",
        "key_orthogonality": "keys, mean |cos|",
        "attention_drift": "distance to its end",
    }
    row, step = _row(run), run["step"].values
    figure, axes = figures.panels(4, 2.3, 2.2, most=4, share=False)
    for axis, (metric, title) in zip(axes, shown.items(), strict=True):
        values = _middle(run[metric].values[row])  # (eval, layer, head)
        for layer, colour in enumerate(figures.colours(range(values.shape[1]))):
            for head in range(values.shape[2]):
                label = f"layer {layer + 1}" if head == 0 else None
                axis.plot(step, values[:, layer, head], color=colour, label=label)
        if metric == "key_orthogonality":
            null = np.nanmean(run["key_orthogonality_random"].values[row])
            axis.axhline(null, color="0.35", linestyle="--", linewidth=1.2)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_xlim(0, step[-1])
    figures.log_if_wide(axes[1], "y", run["routing_pressure"].values[row])
    count = run.attrs["config"]["seeds"]
    figures.legend(figure, axes[0], f"each line a head, mean of {count} seeds")
    return figure


def _middle(values: np.ndarray) -> np.ndarray:
    """Mean over seeds that did not diverge; NaN where an arm has nothing."""
    kept = [own for own in values if np.isfinite(own).any()]
    return np.mean(kept, axis=0)


_SHOWN_NULLS = {
    "end": "found",
    "start": "before training",
    "random": "random",
    "shuffled": "shuffled",
    "permuted": "permuted",
}


def _geometry(run: Run) -> Figure:
    titles = {
        "key_orthogonality": "keys, mean |cos|\n(0: orthogonal)",
        "relative_entropy": "entropy of attention\n(1: equal shares)",
        "entropy_axis": "PC1 and entropy,\n|rank correlation|",
        "entropy_axis_within": "the same within\npositions",
        "belief_read_out": "beliefs read from\nthe stream, R²",
    }
    row = _row(run)
    titles = {
        name: title
        for name, title in titles.items()
        if np.isfinite(run[name].values[row, :, -1]).any()
    }
    figure = Figure(figsize=(1.95 * len(titles) + 0.7, 3.1), layout="constrained")
    axes = figures.divided(figure, len(titles), len(titles), share=False)
    colours = dict(zip(_SHOWN_NULLS, figures.colours(list(_SHOWN_NULLS)), strict=True))
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        values = layer_curves.of_layers(run, row, name)
        columns = {"end": values[:, -1], "start": values[:, 0]}
        columns |= {
            null: layer_curves.of_layers(run, row, f"{name}_{null}")[:, -1]
            for null in layer_curves.GEOMETRY[name]
        }
        first = 0 if name == "belief_read_out" else 1
        for number, (which, found) in enumerate(columns.items()):
            for layer in range(found.shape[1]):
                _column(
                    axis,
                    layer + first + (number - (len(columns) - 1) / 2) * 0.16,
                    # A fit that is worse than none at all is as good as none here.
                    np.maximum(found[:, layer], -0.25),
                    colours[which],
                    _SHOWN_NULLS[which] if layer == 0 else None,
                )
        axis.set_title(title, fontsize=9)
        # All of them are shares or cosines; intervals of few seeds may reach beyond.
        axis.set_ylim(-0.3 if name == "belief_read_out" else -0.03, 1.05)
        axis.set_xlabel("after layer" if first == 0 else "layer")
        axis.set_xticks(range(first, first + values.shape[2]))
    handles, labels = [], []
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _column(
    axis: Axes, place: float, values: np.ndarray, colour: str, label: str | None
) -> None:
    """Seeds at one place: each pale, their mean and its interval strong."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return
    style = {"alpha": 0.35, "markersize": 3.5, "markeredgewidth": 0}
    axis.plot(np.full(len(values), place), values, "o", color=colour, **style)
    found = stats.estimate(values)
    if found.ci95 is not None:
        axis.plot([place, place], found.ci95, color=colour, linewidth=1.8)
    axis.plot(place, found.mean, "o", color=colour, markersize=5, label=label)


def _manifold(run: Run) -> Figure:
    row, seed = _row(run), _first(run)
    points = run["manifold"].values[row, seed]  # (layer, point, axis)
    entropy = run["manifold_entropy_bits"].values[row, seed]
    count = layer_curves.model_field(run, row, "depth")
    figure, axes = figures.panels(count, 2.6, 2.4, most=5, share=False)
    for layer, axis in enumerate(axes):
        dots = axis.scatter(
            *points[layer].T, c=entropy, s=9, cmap="viridis", linewidth=0, alpha=0.8
        )
        share = run["main_axis_share"].values[row, seed, -1, layer]
        axis.set_title(f"layer {layer + 1}")
        axis.set_xlabel(f"PC1 ({share:.0%} of the variance)")
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_ylabel("PC2")
    figure.colorbar(dots, ax=axes, label="posterior entropy, bits")
    return figure


def _ablation(run: Run) -> Figure:
    row = _row(run)
    base = run["heldout_kl_bits"].values[row, :, -1]
    kept = np.isfinite(base)
    names, columns, kinds = [], [], []
    parts = {"head": "head {}", "heads": "all heads", "mlp": "MLP", "layer": "layer"}
    for layer in range(layer_curves.model_field(run, row, "depth")):
        for part in parts:
            name = f"{part}_averaged_kl_bits"
            if name not in run:
                continue
            values = run[name].values[row, kept, layer].reshape(kept.sum(), -1)
            for number in range(values.shape[1]):
                if np.isfinite(values[:, number]).any():
                    names.append(f"{layer + 1}: {parts[part].format(number + 1)}")
                    columns.append(values[:, number])
                    kinds.append(list(parts).index(part))
    size = 1.1 + 0.34 * len(names), 2.9
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    colours = figures.colours(range(len(parts)))
    for place, (values, kind) in enumerate(zip(columns, kinds, strict=True)):
        style = {"alpha": 0.4, "markersize": 4, "markeredgewidth": 0}
        seeds = np.full(len(values), place)
        axis.plot(seeds, values, "o", color=colours[kind], **style)
        middle = math.exp(np.log(np.maximum(values, 1e-12)).mean())
        axis.plot(place, middle, "o", color=colours[kind], markersize=6)
    axis.axhline(base[kept].mean(), color="0.35", linestyle="--", linewidth=1.2)
    figures.log_if_wide(axis, "y", np.array([*columns, base[kept]]))
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axis.set_ylabel("KL(Bayes ‖ model), bits")
    axis.set_xlabel("layer: part replaced by its mean")
    return figure


def _attention(run: Run) -> Figure:
    row = _row(run)
    maps = run["attention_map"].values[row, _first(run)]  # (layer, head, T, T)
    depth, heads = (
        layer_curves.model_field(run, row, name) for name in ("depth", "heads")
    )
    figure, axes = figures.panels(depth * heads, 1.6, 1.55, most=heads)
    for axis, (layer, head) in zip(axes, np.ndindex(depth, heads), strict=True):
        length = maps.shape[2]
        allowed = np.tril(np.ones((length, length), bool))
        shown = np.where(allowed, maps[layer, head], np.nan)
        picture = axis.imshow(shown, vmin=0, vmax=1, cmap="magma_r", aspect="equal")
        axis.grid(visible=False)
        axis.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
    figures.name_axes(axes, "source", "query")
    figure.colorbar(picture, ax=axes, label="weight", shrink=0.7)
    return figure
