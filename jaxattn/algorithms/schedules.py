"""How parameters move: pure (init, step) pairs, in the manner of optax.

`step` is given one sequence or several (a leading axis, averaged over). Learning rates
may be traced, so that a grid of them is one program.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxattn.kernels import streaming
from jaxattn.models import transformer
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws, losses, m_steps
from jaxattn.theory.attention import Params
from jaxattn.theory.m_steps import Held, MStep

# Of parameters, a sequence and the key of what is random, such as dropout, if anything.
GradientFunction = Callable[[Params, Batch, jax.Array], tuple[jax.Array, Params]]
MixFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# What moves together, and may be given a rule of its own: of a head, and of the layers
# of a transformer.
ROLES = ("query", "key", "value", "output")
LAYER_ROLES = transformer.ROLES
_ROLE_OF = {
    "w_q": "query",
    "w_k": "key",
    "w_v": "value",
    "w_o": "output",
    "b_o": "output",
}


# When the frame's gradient is taken: after the M-step, or at the same point.
ORDERS = ("alternating", "simultaneous")


class RoleError(ValueError):
    """A parameter role that nothing moves, that two parts move, or that is none."""


class State(NamedTuple):
    """What a schedule carries from step to step."""

    params: Any  # `attention.Params`, or nested dicts of `transformer`
    opt_state: Any  # of optax, or `EMState`


class EMState(NamedTuple):
    """What `em` carries beside the parameters."""

    frame: optax.OptState
    memory: Any  # of the M-step


class Info(NamedTuple):
    """What a step reports."""

    loss: jax.Array  # nats, before the update


class Schedule(NamedTuple):
    """A pure training schedule.

    init(params) -> State;  step(state, batch, key) -> (State, Info)
    """

    init: Callable[[Params], State]
    step: Callable[[State, Batch, jax.Array], tuple[State, Info]]


class Wiring(NamedTuple):
    """How a head is wired while it trains, beside its weights."""

    causal: bool
    value_norm: bool = False  # LayerNorm on the values, see `attention.values`
    dropout_rate: float = 0.0  # of attention weights, see `laws.drop`


def by_streaming(
    params: Params, batch: Batch, key: jax.Array | None = None, *, wiring: Wiring
) -> tuple[jax.Array, Params]:
    """Loss and gradient of one sequence through `streaming.attend`.

    Args:
      params: of the head.
      batch: one sequence.
      key: of the dropout; only looked at if there is some.
      wiring: of the head.
    """

    def loss(params: Params) -> jax.Array:
        query, sought = batch.inputs @ params.w_q, batch.inputs @ params.w_k
        context = streaming.attend(
            query,
            sought,
            attention.values(params, batch.inputs, value_norm=wiring.value_norm),
            causal=wiring.causal,
            dropout_rate=wiring.dropout_rate,
            dropout_key=key,
        )
        logit = attention.read_out(params, context)
        return losses.cross_entropy(logit, batch.targets, batch.weights)

    return jax.value_and_grad(loss)(params)


def by_laws(
    params: Params, batch: Batch, key: jax.Array | None = None, *, wiring: Wiring
) -> tuple[jax.Array, Params]:
    """The same by the hand-derived laws."""
    if wiring.value_norm or wiring.dropout_rate > 0:
        return _by_dense_laws(params, batch, key, wiring)
    return laws.loss_and_gradient(
        params, batch.inputs, batch.targets, _mask(batch, wiring), batch.weights
    )


def _by_dense_laws(
    params: Params, batch: Batch, key: jax.Array | None, wiring: Wiring
) -> tuple[jax.Array, Params]:
    """The laws one by one, each variant where it belongs."""
    inputs, norm = batch.inputs, wiring.value_norm
    drop = _dropout(batch, key, wiring)
    f = attention.forward(params, inputs, _mask(batch, wiring), value_norm=norm)
    looked = drop(f.weight)
    context = looked @ f.value
    logit = attention.read_out(params, context)
    delta = laws.logit_gradient(logit, batch.targets, batch.weights)
    upstream = laws.upstream_gradient(delta, params.w_o)
    compatibility = drop(laws.compatibility(upstream, f.value))
    score = laws.score_gradient(f.weight, laws.advantage(f.weight, compatibility))
    value = laws.value_gradient(looked, upstream)
    if norm:
        raw = inputs @ params.w_v
        value = laws.layer_norm_gradient(raw, value, attention.NORM_EPSILON)
    gradient = Params(
        laws.projection_gradient(inputs, laws.query_gradient(score, f.key)),
        laws.projection_gradient(inputs, laws.key_gradient(score, f.query)),
        laws.projection_gradient(inputs, value),
        laws.projection_gradient(context, delta),
        None if params.b_o is None else laws.output_bias_gradient(delta),
    )
    return losses.cross_entropy(logit, batch.targets, batch.weights), gradient


def by_autodiff(
    params: Params, batch: Batch, key: jax.Array | None = None, *, wiring: Wiring
) -> tuple[jax.Array, Params]:
    """The same by autodiff of the dense forward pass."""
    drop, mask = _dropout(batch, key, wiring), _mask(batch, wiring)

    def loss(params: Params) -> jax.Array:
        f = attention.forward(params, batch.inputs, mask, value_norm=wiring.value_norm)
        logit = f.logit
        if wiring.dropout_rate > 0:
            logit = attention.read_out(params, drop(f.weight) @ f.value)
        return losses.cross_entropy(logit, batch.targets, batch.weights)

    return jax.value_and_grad(loss)(params)


def _mask(batch: Batch, wiring: Wiring) -> np.ndarray | None:
    return attention.causal_mask(len(batch.inputs)) if wiring.causal else None


def _dropout(batch: Batch, key: jax.Array | None, wiring: Wiring) -> Callable:
    """What drops entries of a or b (T, T), the same as in `streaming.attend`."""
    rate = wiring.dropout_rate
    if rate == 0:
        return lambda array: array
    length = len(batch.inputs)
    keep = jax.random.bernoulli(key, 1 - rate, (1, length, length))[0]
    return lambda array: laws.drop(array, keep, rate)


GRADIENTS = {"streaming": by_streaming, "laws": by_laws, "autodiff": by_autodiff}
causal_gradient = functools.partial(by_streaming, wiring=Wiring(causal=True))


def mix_by_streaming(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
) -> jax.Array:
    """Contexts of one head, a V, through `streaming.attend`."""
    return streaming.attend(query, key, value, causal=causal)


def mix_by_autodiff(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
) -> jax.Array:
    """The same with all of a, for autodiff."""
    return _mix_forward(query, key, value, causal)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mix_by_laws(query, key, value, causal):
    return _mix_forward(query, key, value, causal)[0]


def _mix_forward(query, key, value, causal):
    mask = attention.causal_mask(len(query)) if causal else None
    weight = attention.weights(attention.scores(query, key), mask)
    return weight @ value, (query, key, value, weight)


def _mix_backward(causal, kept, upstream):
    del causal
    query, key, value, weight = kept
    compatibility = laws.compatibility(upstream, value)
    score_gradient = laws.score_gradient(weight, laws.advantage(weight, compatibility))
    return (
        laws.query_gradient(score_gradient, key),
        laws.key_gradient(score_gradient, query),
        laws.value_gradient(weight, upstream),
    )


_mix_by_laws.defvjp(_mix_forward, _mix_backward)


def mix_by_laws(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
) -> jax.Array:
    """The same with all of a, and the hand-derived laws as its gradient."""
    return _mix_by_laws(query, key, value, causal)


MIXES = {
    "streaming": mix_by_streaming,
    "laws": mix_by_laws,
    "autodiff": mix_by_autodiff,
}
causal_mix = functools.partial(mix_by_streaming, causal=True)


def over_sequences(gradient_function: GradientFunction) -> GradientFunction:
    """Averages a gradient function over the sequences of a batch, if it has several.

    Args:
      gradient_function: of one sequence.

    Returns:
      The same for inputs (T, d_x), and the mean over N for inputs (N, T, d_x).
    """

    def averaged(
        params: Params, batch: Batch, key: jax.Array | None = None
    ) -> tuple[jax.Array, Params]:
        if batch.inputs.ndim == 2:
            return gradient_function(params, batch, key)

        def one(numbered: tuple) -> tuple[jax.Array, Params]:
            number, batch = numbered
            own = None if key is None else jax.random.fold_in(key, number)
            return gradient_function(params, batch, own)

        # One after another: each has a cache-sized working set.
        numbers = jnp.arange(len(batch.inputs))
        results = jax.lax.map(one, (numbers, batch))
        return jax.tree.map(lambda r: jnp.mean(r, axis=0), results)

    return averaged


def gradient(
    tx: optax.GradientTransformation,
    loss_and_gradient: GradientFunction = causal_gradient,
    *,
    whole_batch: bool = False,
) -> Schedule:
    """Gradient steps of any optax transformation.

    θ ← θ + tx(∂L/∂θ)

    Args:
      tx: an optax transformation; its rates may be traced.
      loss_and_gradient: of one sequence; default `by_streaming`, causal.
      whole_batch: it is of all sequences of a batch instead, (N, T, ...).

    Returns:
      Schedule.
    """
    averaged = loss_and_gradient if whole_batch else over_sequences(loss_and_gradient)

    def init(params: Params) -> State:
        return State(params, tx.init(params))

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Info]:
        loss, grads = averaged(state.params, batch, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), Info(loss)

    return Schedule(init, step)


def by_role(
    parts: Mapping[str | tuple[str, ...], optax.GradientTransformation],
    *,
    still: Collection[str] = (),
    roles: Collection[str] = ROLES,
) -> optax.GradientTransformation:
    """A transformation for each parameter role.

    Args:
      parts: a role, or several -> what moves it.
      still: roles that nothing is to move.
      roles: all there are: `ROLES`, or `LAYER_ROLES` for trees of `transformer`.

    Returns:
      An optax transformation for trees of `Params`, parts of which may be None, or of
      `transformer.Params`. To begin with parameters of no role is a RoleError.

    Raises:
      RoleError: a role that is none, that two parts move, or that nothing moves.
    """
    steps = {
        ", ".join(of_part): (of_part, tx)
        for of_part, tx in (
            ((key,) if isinstance(key, str) else tuple(key), tx)
            for key, tx in parts.items()
        )
    }
    named = {name: of_part for name, (of_part, _) in steps.items()}
    check_roles(named, still=still, roles=roles)
    part_of = {role: name for name, of_part in named.items() for role in of_part}

    def labels(params: Any) -> Any:
        def label(path, leaf):
            del leaf
            return part_of.get(role_of(path), "still")

        return jax.tree_util.tree_map_with_path(label, params)

    rules = {name: tx for name, (_, tx) in steps.items()}
    return optax.partition(rules | {"still": optax.set_to_zero()}, labels)


def role_of(path: tuple) -> str:
    """The role of a parameter of a head or of a transformer.

    Args:
      path: of `jax.tree_util`.

    Raises:
      RoleError: it has none.
    """
    role = _ROLE_OF.get(getattr(path[0], "name", None)) or transformer.role_of(path)
    if role is None:
        name = jax.tree_util.keystr(path)
        allowed = ", ".join(LAYER_ROLES)
        raise RoleError(
            f"parameter {name}: has no role; allowed: a path that says which, of"
            f" {allowed}"
        )
    return role


def check_roles(
    parts: Mapping[str, Collection[str]],
    *,
    still: Collection[str] = (),
    shared: Collection[str] = (),
    roles: Collection[str] = ROLES,
) -> None:
    """Raises RoleError unless each parameter role is moved once, or as said.

    Args:
      parts: name of a part -> the roles that it moves.
      still: roles that nothing is to move.
      shared: roles that several parts may move.
      roles: all there are.
    """
    claims = [(role, part) for part, of_part in parts.items() for role in of_part]
    claims += [(role, "still") for role in still]
    for role, part in [*claims, *((role, "shared") for role in shared)]:
        if role not in roles:
            raise RoleError(f"{part}: role {role!r}; allowed: {', '.join(roles)}")
    for role in roles:
        movers = [part for claimed, part in claims if claimed == role]
        if not movers:
            raise RoleError(
                f"role {role!r}: nothing moves it; allowed: a part that does, or to"
                f" name it in still=({role!r},)"
            )
        if len(movers) > 1 and (role not in shared or "still" in movers):
            raise RoleError(
                f"role {role!r}: moved by {' and '.join(map(repr, movers))}; allowed:"
                f" one part, or several if named in shared=({role!r},)"
            )


def two_timescale(
    *,
    routing_rate: jax.typing.ArrayLike,
    value_rate: jax.typing.ArrayLike,
    output_rate: jax.typing.ArrayLike,
    loss_and_gradient: GradientFunction = causal_gradient,
    roles: Collection[str] = ROLES,
    whole_batch: bool = False,
) -> Schedule:
    """Gradient descent with a rate for each role; EM-like where values are fast.

    W_Q, W_K ← W - η_QK ∂L/∂W,  W_V ← W_V - η_V ∂L/∂W_V,  W_O, b_O ← W - η_O ∂L/∂W

    In a transformer so in every layer; all that is neither goes with the output.

    All at the same point ("simultaneous"), as in the authors' public script.

    Args:
      routing_rate: η_QK.
      value_rate: η_V.
      output_rate: η_O.
      loss_and_gradient: of one sequence; default `by_streaming`, causal.
      roles: all there are, see `by_role`.
      whole_batch: see `gradient`.

    Returns:
      Schedule.

    Source: arXiv 2512.22473, section 4.
    """
    rest = tuple(role for role in roles if role not in ("query", "key", "value"))
    return gradient(
        by_role(
            {
                ("query", "key"): optax.sgd(routing_rate),
                "value": optax.sgd(value_rate),
                rest: optax.sgd(output_rate),
            },
            roles=roles,
        ),
        loss_and_gradient,
        whole_batch=whole_batch,
    )


def em(
    m_step: MStep,
    frame: optax.GradientTransformation,
    *,
    order: str = "alternating",
    inner_steps: int = 1,
    frame_roles: Collection[str] = ("query", "key", "output"),
    still: Collection[str] = (),
    shared: Collection[str] = (),
    mix: MixFunction = causal_mix,
    loss_and_gradient: GradientFunction = causal_gradient,
) -> Schedule:
    """Expectation-maximisation: responsibilities are held while the values move.

    E-step: a from W_Q, W_K, and Z = a X.  M-step: W_V under held a, `inner_steps`
    times.  Frame step: W_Q, W_K, W_O, b_O by optax, with the gradient taken

      "alternating"   after the M-step: with a held, ∂L/∂Z = δ W_Oᵀ W_Vᵀ goes back
                      through a, so that all of it costs the attention of one gradient;
      "simultaneous"  before it, at the point where the M-step begins too. With
                      `m_steps.gradient` and one inner step this is `two_timescale`.

    Args:
      m_step: from `m_steps`: `gradient`, `prototype`, `majorised`, or one's own.
      frame: an optax transformation; its rates may be traced. See `by_role`.
      order: when the frame's gradient is taken.
      inner_steps: how often W_V moves under the same a, at least 1; static.
      frame_roles: what the frame moves.
      still: roles that nothing is to move.
      shared: roles that M-step and frame may both move.
      mix: (q, k, v) -> a v of one sequence; default `mix_by_streaming`, causal.
      loss_and_gradient: of one sequence; only for "simultaneous".

    Returns:
      Schedule. Info.loss is that before the step.

    Raises:
      RoleError: a role that nothing moves, or M-step and frame both.
      ValueError: order or inner_steps are none.

    Source: arXiv 2512.22473, section 4.
    """
    check_roles(
        {"m_step": ("value",), "frame": frame_roles}, still=still, shared=shared
    )
    if order not in ORDERS:
        raise ValueError(f"order={order!r}; allowed: {', '.join(ORDERS)}")
    if inner_steps < 1:
        raise ValueError(f"inner_steps={inner_steps}; allowed: 1 or more")
    averaged = over_sequences(loss_and_gradient)
    moved_by_frame = {name for name, role in _ROLE_OF.items() if role in frame_roles}

    def of_frame(params: Params) -> Params:
        left_out = set(Params._fields) - moved_by_frame
        return params._replace(**dict.fromkeys(left_out))

    def init(params: Params) -> State:
        return State(params, EMState(frame.init(of_frame(params)), m_step.init(params)))

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Info]:
        params, (frame_state, memory) = state
        held, pull_back = hold(params, batch, mix)
        if order == "simultaneous":
            loss, grads = averaged(params, batch, key)
            value_gradient = grads.w_v
        else:
            loss, _, _, value_gradient = m_steps.signals(params, held)
        plan, memory = m_step.begin(memory, params, held)

        def inner(_, carry: tuple[Params, jax.Array]) -> tuple[Params, jax.Array]:
            moving, value_gradient = carry
            w_v = moving.w_v + m_step.move(plan, moving, value_gradient)
            moving = moving._replace(w_v=w_v)
            return moving, m_steps.signals(moving, held).value_gradient

        moved, _ = jax.lax.fori_loop(0, inner_steps, inner, (params, value_gradient))
        if order == "alternating":
            grads = held_gradient(moved, held, pull_back)
        updates, frame_state = frame.update(
            of_frame(grads), frame_state, of_frame(moved)
        )
        updated = optax.apply_updates(of_frame(moved), updates)
        changed = {name: getattr(updated, name) for name in moved_by_frame}
        state = State(moved._replace(**changed), EMState(frame_state, memory))
        return state, Info(loss)

    return Schedule(init, step)


def hold(
    params: Params, batch: Batch, mix: MixFunction
) -> tuple[Held, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """E-step: attention of each sequence, held.

    Z = a X,  N = aᵀ 1

    Args:
      params: of the head; W_Q and W_K are all that is looked at.
      batch: one sequence, or several with a leading axis.
      mix: (q, k, v) -> a v of one sequence.

    Returns:
      Held, and the way back through a: ∂L/∂Z (R, d_x) -> (∂L/∂W_Q, ∂L/∂W_K). The moment
      takes a backward pass of its own, which XLA leaves out if nobody looks at it.
    """
    single = batch.inputs.ndim == 2
    several = jax.tree.map(lambda leaf: leaf[None], batch) if single else batch
    num_sequences, length, d_x = several.inputs.shape
    dtype = several.inputs.dtype

    def mixed(w_q: jax.Array, w_k: jax.Array) -> jax.Array:
        def one(inputs: jax.Array) -> jax.Array:
            return mix(inputs @ w_q, inputs @ w_k, inputs)

        rows = one(batch.inputs) if single else jax.lax.map(one, batch.inputs)
        return rows.reshape(-1, d_x)

    def moment(inputs: jax.Array) -> jax.Array:
        query, key = inputs @ params.w_q, inputs @ params.w_k
        ones = jnp.ones((length, 1), dtype)
        _, columns = jax.vjp(lambda value: mix(query, key, value), ones)
        (usage,) = columns(ones)
        return inputs.T @ (usage * inputs)

    def shares(weights: jax.Array | None) -> jax.Array:
        return losses.position_shares(weights, length, dtype) / num_sequences

    if batch.weights is None:
        share = jnp.tile(shares(None), num_sequences)
    else:
        share = jax.vmap(shares)(several.weights).reshape(-1)
    z, pull_back = jax.vjp(mixed, params.w_q, params.w_k)
    held = Held(
        mixed=z,
        targets=several.targets.reshape(-1),
        share=share,
        moment=jnp.mean(jax.lax.map(moment, several.inputs), axis=0),
    )
    return held, pull_back


def held_gradient(
    params: Params,
    held: Held,
    pull_back: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> Params:
    """Gradient of the loss for all parameters, through attention that is held.

    ∂L/∂Z = u W_Vᵀ,  u = δ W_Oᵀ,  ∂L/∂W_O = gᵀ δ,  ∂L/∂b_O = Σ_i δ_i

    Args:
      params: with the W_Q and W_K of the E-step, and any values and read-out.
      held: from `hold`.
      pull_back: from `hold`.

    Returns:
      Params.
    """
    _, context, delta, value_gradient = m_steps.signals(params, held)
    upstream = laws.upstream_gradient(delta, params.w_o)
    bias = None if params.b_o is None else laws.output_bias_gradient(delta)
    return Params(
        *pull_back(upstream @ params.w_v.T), value_gradient, context.T @ delta, bias
    )


class HeldModel(NamedTuple):
    """What `layered_em` needs of a model, as functions of a whole batch."""

    hold: Callable[[Any, Batch], Any]  # parameters -> what decides on attention
    value_gradient: Callable[[Any, Batch, Any], Any]  # ∂L under held attention


def layered_em(
    model: HeldModel,
    frame: optax.GradientTransformation,
    loss_and_gradient: GradientFunction,
    *,
    value_rate: jax.typing.ArrayLike,
    order: str,
    inner_steps: int,
) -> Schedule:
    """EM in every layer at once, with the `gradient` M-step.

    E-step: queries and keys of all layers, and so attention, are held.  M-step: W_V of
    all layers by -η_V ∂L/∂W_V under held attention, `inner_steps` times.  Frame step:
    all else by optax, with the gradient of the moving model, taken after the M-step
    ("alternating") or at the same point ("simultaneous", and so is then the first of
    the inner steps' gradients: with one of them this is `two_timescale`).

    With one layer attention hangs on nothing that the M-step moves, and this is `em`.

    Args:
      model: see `HeldModel`.
      frame: an optax transformation that leaves the values still.
      loss_and_gradient: of a whole batch.
      value_rate: η_V.
      order: one of `ORDERS`.
      inner_steps: at least 1; static.

    Returns:
      Schedule. Info.loss is that before the step.
    """

    def moved(params: Any, gradient: Any) -> Any:
        def leaf(path, weight, slope):
            return weight - value_rate * slope if role_of(path) == "value" else weight

        return jax.tree_util.tree_map_with_path(leaf, params, gradient)

    def init(params: Any) -> State:
        return State(params, frame.init(params))

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Info]:
        params, frame_state = state
        held = model.hold(params, batch)
        loss, grads = loss_and_gradient(params, batch, key)
        simultaneous = order == "simultaneous"
        first = grads if simultaneous else model.value_gradient(params, batch, held)
        values = jax.lax.fori_loop(
            1,
            inner_steps,
            lambda _, p: moved(p, model.value_gradient(p, batch, held)),
            moved(params, first),
        )
        if not simultaneous:
            _, grads = loss_and_gradient(values, batch, key)
        updates, frame_state = frame.update(grads, frame_state, values)
        return State(optax.apply_updates(values, updates), frame_state), Info(loss)

    return Schedule(init, step)


class Structure(NamedTuple):
    """The part of an arm that shapes the compiled program."""

    schedule: str
    optimizer: str | None = None  # of "gradient", and of the frame of "em"
    m_step: str | None = None  # of "em", as the next two
    order: str | None = None
    inner_steps: int | None = None
    value_norm: bool = False  # of the others, see `Wiring`
    dropout_rate: float = 0.0
    warm_up: float = 0.0  # of "adamw", see `warm_up_cosine`
    # Of a transformer: in what it differs from the config's model, (field, value).
    model: tuple[tuple[str, Any], ...] = ()


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
}

# Optimizers that have a schedule of their own for "gradient", and what they ask for.
SCHEDULED: dict[str, tuple[str, ...]] = {"adamw": ("learning_rate", "weight_decay")}

# M-step -> its rule, and the rates it asks for.
M_STEPS: dict[str, tuple[Callable[..., MStep], tuple[str, ...]]] = {
    "gradient": (m_steps.gradient, ("value_rate",)),
    "prototype": (m_steps.prototype, ("value_rate", "ridge")),
    "majorised": (m_steps.majorised, ("ridge", "damping", "statistics_rate")),
}

# Schedule -> the part of a structure that it asks for.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "gradient": ("optimizer",),
    "two_timescale": (),
    "em": ("optimizer", "m_step", "order", "inner_steps"),
}

# Those that may also be wired otherwise; "em" holds attention as it is.
WIRED = ("gradient", "two_timescale")


def rates_of(structure: Structure) -> tuple[str, ...]:
    """The rates that an arm of this structure asks for, all of which may be traced."""
    if structure.schedule == "gradient":
        return SCHEDULED.get(structure.optimizer, ("learning_rate",))
    if structure.schedule == "two_timescale":
        return ("routing_rate", "value_rate", "output_rate")
    return ("routing_rate", "output_rate", *M_STEPS[structure.m_step][1])


def spread(rates: dict, scale: jax.Array, ratio: jax.Array) -> dict:
    """The rates of an arm at points of a grid.

    Learning rates times scale, the values' times ratio as well. An M-step in closed
    form has no rate: there the ridge, which slows the values down, is divided by it.

    Args:
      rates: name -> value.
      scale: (P,).
      ratio: (P,), η_V / η_QK where the arm's own rates are equal.

    Returns:
      name -> (P,).
    """
    factors = dict.fromkeys(("learning_rate", "routing_rate", "output_rate"), scale)
    factors["value_rate"] = scale * ratio
    if "value_rate" not in rates:
        factors["ridge"] = 1 / ratio
    one = np.ones(scale.shape, scale.dtype)
    return {name: rate * factors.get(name, one) for name, rate in rates.items()}


def warm_up_cosine(warm_up: float, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Share of the learning rate at a step: up in a line, then down a half cosine.

    n / (w N) for n < w N, then (1 + cos(π (n - w N) / (N - w N))) / 2

    Args:
      warm_up: w, share of the steps, in [0, 1).
      steps: N.
    """
    rising = min(round(warm_up * steps), steps - 1)
    if rising == 0:
        return optax.cosine_decay_schedule(1.0, steps)
    return optax.warmup_cosine_decay_schedule(0.0, 1.0, rising, steps)


def optimizer_of(
    structure: Structure, rates: dict, steps: int
) -> optax.GradientTransformation:
    """What moves all parameters of a "gradient" arm alike; rates may be traced."""
    if structure.optimizer in SCHEDULED:
        share = warm_up_cosine(structure.warm_up, steps)
        return optax.adamw(
            lambda count: rates["learning_rate"] * share(count.astype(jnp.float32)),
            weight_decay=rates["weight_decay"],
        )
    return OPTIMIZERS[structure.optimizer](rates["learning_rate"])


def build(
    structure: Structure,
    rates: dict,
    loss_and_gradient: GradientFunction,
    mix: MixFunction,
    *,
    steps: int,
) -> Schedule:
    """The schedule that an arm of a config asks for.

    Args:
      structure: names from `SCHEDULES`, `OPTIMIZERS`, `M_STEPS` and `ORDERS`.
      rates: name -> value, possibly traced.
      loss_and_gradient: of one sequence.
      mix: (q, k, v) -> a v of one sequence; only for "em".
      steps: of the whole run, which a rate may hang on.

    Returns:
      Schedule.
    """
    if structure.schedule == "two_timescale":
        return two_timescale(**rates, loss_and_gradient=loss_and_gradient)
    if structure.schedule == "gradient":
        return gradient(optimizer_of(structure, rates, steps), loss_and_gradient)
    optimizer = OPTIMIZERS[structure.optimizer]
    rule, own = M_STEPS[structure.m_step]
    frame = by_role(
        {
            ("query", "key"): optimizer(rates["routing_rate"]),
            "output": optimizer(rates["output_rate"]),
        },
        still=("value",),
    )
    return em(
        rule(*(rates[name] for name in own)),
        frame,
        order=structure.order,
        inner_steps=structure.inner_steps,
        mix=mix,
        loss_and_gradient=loss_and_gradient,
    )


def build_layered(
    structure: Structure,
    rates: dict,
    loss_and_gradient: GradientFunction,
    held: HeldModel | None,
    *,
    steps: int,
) -> Schedule:
    """The same for a transformer, or a model without attention.

    Args:
      structure: as for `build`, with the m_step "gradient" alone.
      rates: name -> value, possibly traced.
      loss_and_gradient: of a whole batch.
      held: for "em"; None without attention.
      steps: of the whole run.

    Returns:
      Schedule.
    """
    if structure.schedule == "two_timescale":
        return two_timescale(
            **rates,
            loss_and_gradient=loss_and_gradient,
            roles=LAYER_ROLES,
            whole_batch=True,
        )
    if structure.schedule == "gradient":
        tx = optimizer_of(structure, rates, steps)
        return gradient(tx, loss_and_gradient, whole_batch=True)
    optimizer = OPTIMIZERS[structure.optimizer]
    frame = by_role(
        {
            ("query", "key"): optimizer(rates["routing_rate"]),
            ("output", "mlp", "embed"): optimizer(rates["output_rate"]),
        },
        still=("value",),
        roles=LAYER_ROLES,
    )
    return layered_em(
        held,
        frame,
        loss_and_gradient,
        value_rate=rates["value_rate"],
        order=structure.order,
        inner_steps=structure.inner_steps,
    )
