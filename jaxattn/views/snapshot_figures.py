"""Pictures and animation of one seed's attention, advantage and values, from snapshots.

Each `..._data` function gives the numbers of a picture.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import PIL.Image
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxattn.analysis import entries, head, observations
from jaxattn.measures import diagnostics
from jaxattn.runs import Run
from jaxattn.views import figures
from jaxattn.views.figures import Picture

_RELATIVE = matplotlib.colors.LogNorm(1 / 16, 16, clip=True)
_QUERY = "query"
_MOST = 5  # maps in a row
_MOST_FRAMES = 100
_FRAME, _LAST = 120, 2000  # milliseconds that a frame of an animation is shown


class Snapshots(NamedTuple):
    """Snapshots of the first snapshot seed, positions in the order of the picture."""

    arms: list[str]
    steps: np.ndarray  # (K,)
    weight: np.ndarray  # a (arm, K, n, n)
    relative: np.ndarray  # times the unmasked sources; NaN where masked
    advantage: np.ndarray  # A (arm, K, n, n), of each query's own loss; NaN likewise
    value: np.ndarray  # v (arm, K, n, d_v)
    label: np.ndarray  # (n,) what each position shows, -1 where it is not known
    allowed: np.ndarray  # (n, n)
    by_label: (
        bool  # whether positions are sorted by label: where their order says nothing
    )


class Plane(NamedTuple):
    """Values along the two principal axes of all arms' motion together."""

    points: np.ndarray  # (arm, K, n, 2)
    share: np.ndarray  # (arm,) of its motion; NaN where nothing moved, or diverged


def snapshots(run: Run) -> Snapshots:
    """What a run kept of its first snapshot seed."""
    allowed = run["attention_allowed"].values
    target, lag = run["target"].values[0, 0, 0].astype(int), entries.task_of(run)["lag"]
    label = np.concatenate([np.full(lag, -1), target])[: len(target)]
    by_label = bool(allowed.all())
    order = np.argsort(label, kind="stable") if by_label else np.arange(len(label))

    def of_first(maps: np.ndarray) -> np.ndarray:
        return maps[:, 0][..., order, :][..., order]

    weight, allowed = of_first(run["attention"].values), allowed[order][:, order]
    return Snapshots(
        run.attrs["config"]["run_arms"],
        np.array(run["snapshot_step"].values),
        weight,
        figures.relative_attention(weight, allowed),
        np.where(allowed, of_first(observations.matrices(run).advantage), np.nan),
        run["value"].values[:, 0][..., order, :],
        label[order],
        allowed,
        by_label,
    )


def plane(snapshot: Snapshots) -> Plane:
    """One common basis for the values of all arms at all snapshots.

    The axes are those of the motion, from where values started. Each arm has the same
    say, or the one that goes farthest would choose them for all.
    """
    moved = (snapshot.value - snapshot.value[:, :1]).reshape(
        len(snapshot.arms), -1, snapshot.value.shape[-1]
    )
    moved = moved - moved.mean(axis=1, keepdims=True, dtype=np.float64)
    size = np.sum(moved**2, axis=(1, 2))
    known = np.isfinite(size) & (size > 0)
    alike = moved[known] / np.sqrt(size[known])[:, None, None]
    alike = alike.reshape(-1, moved.shape[2]) if known.any() else moved[0] * 0
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        axes = np.asarray(diagnostics.manifold(jnp.asarray(alike)).axes)
    across = np.zeros((2, moved.shape[2]))  # of values of one dimension the second is 0
    across[: len(axes[:2])] = axes[:2]
    share = np.full(len(snapshot.arms), np.nan)
    share[known] = np.sum((moved[known] @ across.T) ** 2, axis=(1, 2)) / size[known]
    return Plane(snapshot.value @ across.T, share)


def usage_data(snapshot: Snapshots) -> np.ndarray:
    """Column usage over that of equal shares (arm, K, n)."""
    equal = snapshot.allowed / snapshot.allowed.sum(axis=1, keepdims=True)
    return snapshot.weight.sum(axis=2) / equal.sum(axis=0)


# --- attention


def _attention(run: Run, snapshot: Snapshots) -> Figure:
    """Attention before and after, and after over before."""
    maps = {"before training": snapshot.relative[0, 0]}
    maps |= {
        f"after {a}": r[-1]
        for a, r in zip(snapshot.arms, snapshot.relative, strict=True)
    }
    changes = change_data(snapshot)
    rows = -(-len(maps) // _MOST)
    columns = -(-len(maps) // rows)
    figure = Figure(
        figsize=(max(1.5 * columns + 1.3, figures.NARROWEST), 3.3 * rows + 1.0),
        layout="constrained",
    )
    top, bottom = figure.subfigures(2, 1)
    for part, drawn, colours, label in (
        (top, maps, "RdBu_r", "weight / equal share"),
        (bottom, changes, "PuOr_r", "after / before"),
    ):
        axes = figures.divided(part, len(drawn), columns)
        for axis, (title, values) in zip(axes, drawn.items(), strict=True):
            image = _show(axis, values, _RELATIVE, colours)
            axis.set_title(title, fontsize=9)
        figures.name_axes(axes, _source(snapshot), _QUERY)
        bar = part.colorbar(image, ax=part.axes, shrink=0.8, aspect=20, extend="both")
        _times(bar, label)
    figure.suptitle(_title(run, snapshot, "Attention"), fontsize=10)
    return figure


def change_data(snapshot: Snapshots) -> dict[str, np.ndarray]:
    """Attention at the end over that at the start, by arm (n, n); 0 / 0 is 1."""
    tiny = np.finfo(np.float32).tiny
    return {
        arm: (relative[-1] + tiny) / (relative[0] + tiny)
        for arm, relative in zip(snapshot.arms, snapshot.relative, strict=True)
    }


def _advantage(run: Run, snapshot: Snapshots) -> Figure:
    """The advantage matrix at up to five snapshots, an arm in each row."""
    places = np.unique(np.linspace(0, len(snapshot.steps) - 1, 5).round().astype(int))
    size = 1.35 * len(places) + 1.2, max(1.35 * len(snapshot.arms) + 0.8, 3.0)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(snapshot.arms), len(places), squeeze=False)
    norm = _advantage_norm(snapshot)
    for row, arm in enumerate(snapshot.arms):
        for axis, place in zip(axes[row], places, strict=True):
            image = _show(axis, snapshot.advantage[row, place], norm, "PiYG")
            if row == 0:
                axis.set_title(f"step {snapshot.steps[place]}")
        axes[row, 0].set_ylabel(f"{arm}\n{_QUERY}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel(_source(snapshot), fontsize=9)
    bar = figure.colorbar(image, ax=axes, extend="both", aspect=8 * len(snapshot.arms))
    bar.set_label("advantage, nats per unit of weight\n(> 0: looking more helps)")
    levels = [v for v in (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30) if v < norm.vmax]
    bar.set_ticks([*(-v for v in levels[-3:]), 0, *levels[-3:]])
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.minorticks_off()
    figure.suptitle(_title(run, snapshot, "Advantage"), fontsize=10)
    return figure


def _advantage_norm(snapshot: Snapshots) -> matplotlib.colors.Normalize:
    """The same for all: up to the size that 99 % of all entries stay below."""
    sizes = np.abs(snapshot.advantage[np.isfinite(snapshot.advantage)])
    most = float(np.quantile(sizes, 0.99)) if len(sizes) else 0.0
    most = most or 1.0
    return matplotlib.colors.SymLogNorm(most / 5, vmin=-most, vmax=most, clip=True)


# --- values


def _values(run: Run, snapshot: Snapshots) -> Figure:
    """Trajectories of the values, an arm in each panel, along one common basis."""
    found = plane(snapshot)
    figure, axes = figures.panels(len(snapshot.arms), 1.75, 1.9, share=False)
    colours = position_colours(snapshot)
    for axis, arm, paths, share in zip(
        axes, snapshot.arms, found.points, found.share, strict=True
    ):
        _paths(axis, paths, colours)
        went = "does not move" if np.isfinite(paths).all() else "diverged"
        went = went if np.isnan(share) else f"{share:.0%} of its motion"
        axis.set_title(f"{arm}\n{went}", fontsize=9)
        axis.tick_params(labelsize=7)
    figures.name_axes(axes, "PC1", "PC2")
    figure.suptitle(
        _title(run, snapshot, "Values, from circles to dots") + "; coloured by label",
        fontsize=10,
    )
    return figure


def _paths(axis: Axes, paths: np.ndarray, colours: list) -> list:
    """The trajectories (K, n, 2) of values; what is drawn of each, to be moved."""
    drawn = []
    for number, colour in enumerate(colours):
        path = paths[:, number]
        (line,) = axis.plot(*path.T, color=colour, linewidth=0.9, alpha=0.8)
        axis.plot(*path[0], "o", color=colour, markersize=3.5, markerfacecolor="white")
        (end,) = axis.plot(*path[-1], "o", color=colour, markersize=4)
        drawn.append((line, end))
    return drawn


def position_colours(snapshot: Snapshots) -> list[str]:
    """Returns a colour for each position, by the label of its source."""
    count = int(snapshot.label.max()) + 1
    names = figures.colours(range(count))
    if len(set(names)) < count:
        turbo = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, count))
        names = [matplotlib.colors.to_hex(colour) for colour in turbo]
    return ["#cccccc" if label < 0 else names[label] for label in snapshot.label]


def _usage(run: Run, snapshot: Snapshots) -> Figure:
    """Column usage over time, an arm in each panel."""
    usage = usage_data(snapshot)
    figure, axes = figures.panels(len(snapshot.arms), 1.75, 1.8)
    edges = _edges(snapshot.steps)
    rows = np.arange(usage.shape[2] + 1) - 0.5
    norm = matplotlib.colors.LogNorm(1 / 4, 4, clip=True)
    for axis, arm, of_arm in zip(axes, snapshot.arms, usage, strict=True):
        image = axis.pcolormesh(edges, rows, of_arm.T, norm=norm, cmap="RdBu_r")
        axis.set_title(arm)
        axis.grid(False)
    axes[0].invert_yaxis()  # of all
    figures.name_axes(axes, "step", _source(snapshot))
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=20, extend="both")
    _times(bar, "usage / that of equal shares", (1 / 4, 1 / 2, 1, 2, 4))
    figure.suptitle(_title(run, snapshot, "Column usage"), fontsize=10)
    return figure


def _edges(steps: np.ndarray) -> np.ndarray:
    """Bounds of cells around steps."""
    between = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[steps[0]], between, [steps[-1]]])


PICTURES = {
    "attention": Picture(
        _attention,
        "Attention before and after training, in units of an equal share of the"
        " unmasked sources (white; grey is masked), and what training changed: orange"
        " is gained attention, purple lost it.",
    ),
    "advantage": Picture(
        _advantage,
        "The advantage matrix along training, all on one scale: where it is green the"
        " loss asks to look more, where it is pink to look less.",
    ),
    "values": Picture(
        _values,
        "Where the values of all positions went, along principal axes that all arms"
        " share, each panel on its own scale: circles are the start, dots the end, a"
        " colour is what a position shows (its label).",
    ),
    "usage": Picture(
        _usage,
        "How much of the attention each source gets, over time, in units of what equal"
        " shares would give it (white).",
    ),
}


# --- animation


def draw(run: Run, folder: Path, *, pdf: bool) -> dict[str, str]:
    """Draws every picture of a run's snapshots, see `figures.save`."""
    snapshot = snapshots(run)
    pictures = {
        name: picture._replace(draw=functools.partial(picture.draw, snapshot=snapshot))
        for name, picture in PICTURES.items()
    }
    return figures.save(pictures, run, folder, pdf=pdf) | animate(run, snapshot, folder)


def animate(run: Run, snapshot: Snapshots, folder: Path) -> dict[str, str]:
    """Draws attention, advantage and values of some arms side by side, as a GIF.

    Args:
      run: with snapshots.
      snapshot: from `snapshots`.
      folder: to write to.

    Returns:
      Name of the file -> its caption.
    """
    places = np.unique(np.linspace(0, len(snapshot.steps) - 1, _MOST_FRAMES).round())
    with matplotlib.rc_context(fname=figures.STYLE):
        figure, update = _animation(run, snapshot)
        canvas = FigureCanvasAgg(figure)
        figure.set_dpi(100)
        canvas.draw()  # once; of a frame only what moves
        still, frames = canvas.copy_from_bbox(figure.bbox), []
        for place in places.astype(int):
            canvas.restore_region(still)
            for artist in update(place):
                figure.draw_artist(artist)
            rgb = np.asarray(canvas.buffer_rgba())[..., :3]
            frames.append(PIL.Image.fromarray(np.ascontiguousarray(rgb)))
    # One palette for all, so that nothing flickers; small dots have a say in it too.
    some = [np.asarray(frame) for frame in frames[:: max(len(frames) // 6, 1)]]
    colours = sorted(set(position_colours(snapshot)))
    dots = matplotlib.colors.to_rgba_array(colours)[:, :3]
    dots = np.repeat((255 * dots).round().astype(np.uint8), 20, axis=0)
    dots = np.broadcast_to(dots[:, None], (len(dots), some[0].shape[1], 3))
    palette = PIL.Image.fromarray(np.vstack([*some, dots])).quantize(256)
    flat = PIL.Image.Dither.NONE
    frames = [frame.quantize(palette=palette, dither=flat) for frame in frames]
    frames[0].save(
        folder / "motion.gif",
        save_all=True,
        append_images=frames[1:],
        duration=[_FRAME] * (len(frames) - 1) + [_LAST],
        loop=0,
    )
    shown = ", ".join(_animated(run, snapshot))
    return {"motion.gif": f"The same while they train, side by side: {shown}."}


def _animated(run: Run, snapshot: Snapshots) -> list[str]:
    """The baseline, the first other arm, and the one whose attention moved most."""
    baseline = run.attrs["config"]["baseline"]
    others = [arm for arm in snapshot.arms if arm != baseline]
    moved = np.abs(snapshot.weight[:, -1] - snapshot.weight[:, 0]).sum(axis=(1, 2))
    most = snapshot.arms[int(np.argmax(np.nan_to_num(moved)))]
    chosen = dict.fromkeys((baseline, *others[:1], most))
    return [arm for arm in chosen if arm in snapshot.arms]


def _animation(run: Run, snapshot: Snapshots):
    """A figure, and what puts it at a snapshot and gives all that is drawn anew."""
    arms, found = _animated(run, snapshot), plane(snapshot)
    figure = Figure(figsize=(7.2, 2.3 * len(arms) + 0.75), layout="constrained")
    axes = figure.subplots(len(arms), 3, squeeze=False)
    norm, colours = _advantage_norm(snapshot), position_colours(snapshot)
    moving = []
    rows = [snapshot.arms.index(arm) for arm in arms]
    for line, row in zip(axes, rows, strict=True):
        attention = _show(line[0], snapshot.relative[row, 0], _RELATIVE, "RdBu_r")
        advantage = _show(line[1], snapshot.advantage[row, 0], norm, "PiYG")
        paths = _paths(line[2], found.points[row], colours)
        line[2].set(xlim=line[2].get_xlim(), ylim=line[2].get_ylim())  # held
        line[2].set_ylabel("PC2")
        line[2].tick_params(labelsize=7)
        line[0].set_ylabel(f"{snapshot.arms[row]}\n{_QUERY}", fontsize=9)
        moving.append((row, attention, advantage, paths))
    titles = (
        "attention\nred: more than an equal share",
        "advantage\ngreen: looking more helps",
        "values\ncircles: start, dots: now",
    )
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    for axis in axes[-1, :2]:
        axis.set_xlabel(_source(snapshot))
    axes[-1, 2].set_xlabel("PC1")
    title = figure.suptitle(f"step {snapshot.steps[-1]}", fontsize=10)

    def update(place: int) -> list[Artist]:
        title.set_text(f"step {snapshot.steps[place]}")
        artists = [title]
        for row, attention, advantage, paths in moving:
            attention.set_data(snapshot.relative[row, place])
            advantage.set_data(snapshot.advantage[row, place])
            artists += [attention, advantage]
            for number, (line, end) in enumerate(paths):
                path = found.points[row, : place + 1, number]
                line.set_data(*path.T)
                end.set_data(*path[-1:].T)
                artists += [line, end]
        return artists

    for artist in update(len(snapshot.steps) - 1):
        artist.set_animated(True)  # not part of what is drawn once
    return figure, update


# --- maps


def _show(axis: Axes, values: np.ndarray, norm, colours: str):
    """A matrix over queries and sources."""
    axis.grid(False)
    axis.tick_params(labelsize=7)
    if len(values) <= 20:
        axis.set_xticks([])
        axis.set_yticks([])
    shades = matplotlib.colormaps[colours].with_extremes(bad="0.87")  # masked
    return axis.imshow(values, norm=norm, cmap=shades, interpolation="nearest")


def _source(snapshot: Snapshots) -> str:
    return "source, by label" if snapshot.by_label else "source"


def _times(bar, label: str, ticks=(1 / 16, 1 / 4, 1, 4, 16)) -> None:
    bar.set_label(label)
    names = [f"{t:g}" if t >= 1 else f"1/{1 / t:g}" for t in ticks]
    bar.set_ticks(ticks, labels=names)
    bar.ax.minorticks_off()


def _title(run: Run, snapshot: Snapshots, what: str) -> str:
    where = head.looked_at(run)["sequence"]
    seed = run["snapshot_seed"].values[0]
    return f"{what}; first {len(snapshot.label)} {where} positions, seed {seed}"
