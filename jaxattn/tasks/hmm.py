"""Hidden Markov models: filter one that is written out, or predict one that is fixed.

`hmm`: each sequence has its own model, whose matrices are written out in a header
before the observations; the target is the exact belief over the hidden state.

`fixed_hmm`: one model for all sequences, never shown; the target is the next symbol.
The model is given as labelled matrices T^(o)_ij = p(z_{t+1} = j, o_t = o | z_t = i).

Source: the wind tunnels of arXiv 2512.22471; Shai et al. 2024, arXiv 2405.15943.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.fields import integer, one_of
from jaxattn.tasks import markov
from jaxattn.tasks.base import Batch, Keys, Task, TaskSpec, TransformerSpec
from jaxattn.theory.sizes import check_size

NUM_NUMBERS = 101  # tokens 0..100 are hundredths, observations come after
SMALLEST = 5  # hundredths, of any probability that is drawn


def num_tokens(num_symbols: int) -> int:
    """Size of the vocabulary: numbers, then observations."""
    return NUM_NUMBERS + num_symbols


def header_length(num_states: int, num_symbols: int) -> int:
    """Positions before the first observation: one an entry of both matrices."""
    return num_states * (num_states + num_symbols)


def num_positions(num_states: int, num_symbols: int, num_observations: int) -> int:
    """T: the header, then the observations."""
    return header_length(num_states, num_symbols) + num_observations


def scored(num_states: int, num_symbols: int, num_observations: int) -> np.ndarray:
    """Positions that ask for something (T,) bool: those of observations."""
    length = num_positions(num_states, num_symbols, num_observations)
    return np.arange(length) >= header_length(num_states, num_symbols)


def round_to_hundredths(probability: jax.Array) -> jax.Array:
    """Rounds a distribution to integer hundredths, none below five.

    Each entry becomes max(round(100 p), 5). If the sum is below 100, the rest is added
    to the largest entry. If it is above, the excess is subtracted from the largest
    entry, down to five at least, and what remains of it from the next largest.

    Args:
      probability: p (n,), n at most 20, sums to 1.

    Returns:
      (n,), int32, at least 5; sums to 100.
    """
    chex.assert_rank(probability, 1)
    assert len(probability) * SMALLEST <= 100, "there are a hundred hundredths"
    hundredths = jnp.round(100 * probability).astype(int)
    hundredths = jnp.maximum(hundredths, SMALLEST)
    order = jnp.argsort(hundredths, descending=True)
    spare = hundredths[order] - SMALLEST
    # What larger entries could not give; negative if the sum is below 100.
    excess = jnp.sum(hundredths) - 100 - (jnp.cumsum(spare) - spare)
    largest = np.arange(len(probability)) == 0
    taken = jnp.where(largest, excess, jnp.maximum(excess, 0))
    return hundredths.at[order].add(-jnp.minimum(taken, spare)).astype(jnp.int32)


def _no_distribution(hundredths: jax.Array) -> jax.Array:
    """Entries from which on a row cannot sum to 100 (rows, n) bool."""
    total = jnp.cumsum(hundredths, axis=1)
    last = np.arange(hundredths.shape[1]) == hundredths.shape[1] - 1
    none = (hundredths < 0) | (hundredths >= NUM_NUMBERS)
    return none | (total > 100) | (last[None] & (total != 100))


def hmm(*, num_states: int, num_symbols: int, num_observations: int) -> Task:
    """Returns the task of filtering, with P and E drawn for each sequence.

    z_1 uniform, o_t ~ E[z_t], z_{t+1} ~ P[z_t]; rows of P and E are Dirichlet(1),
    then rounded (`round_to_hundredths`), and the rounded ones are what is drawn from.

    Tokens 0..100 are hundredths, 101 + o is observation o. A sequence is the header,
    P row by row, then E row by row, one token an entry, then the observations.

    Args:
      num_states: S, 2 to 20; also the number of classes.
      num_symbols: O, 2 to 20.
      num_observations: K, at least 1; makes T = S² + S O + K positions.

    Returns:
      Task; at an observation the target is not drawn, but is the exact belief itself,
      p(z_t | o_1..o_t): targets (T, S), uniform in the header. `bayes` is its
      logarithm, from the tokens alone, for any header whose rows are distributions,
      also with entries below five. Impossible are a row whose sum exceeds 100 or ends
      below it, an observation in the header, a number after it, a token outside
      0..100 + O, an observation of probability zero.

    Raises:
      ValueError: a size out of range.
    """
    most = 100 // SMALLEST  # no probability is below a twentieth
    check_size("num_states", num_states, 2, most)
    check_size("num_symbols", num_symbols, 2, most)
    check_size("num_observations", num_observations, 1)
    split = header_length(num_states, num_symbols)
    asked = scored(num_states, num_symbols, num_observations)

    def matrices(header):
        transition, emission = jnp.split(header, [num_states**2])
        return transition.reshape(num_states, -1), emission.reshape(num_states, -1)

    def log_matrices(header):
        return matrices(jnp.log(header.astype(float) / 100))

    def log_belief(tokens):
        header, observed = tokens[:split], tokens[split:] - NUM_NUMBERS
        log_transition, log_emission = log_matrices(header)
        known = (observed >= 0) & (observed < num_symbols)
        log_likelihood = log_emission.T[jnp.clip(observed, 0, num_symbols - 1)]
        log_uniform = -np.log(num_states)
        belief = markov.forward_filter(
            jnp.full((num_states,), log_uniform),
            log_transition,
            jnp.where(known[:, None], log_likelihood, -jnp.inf),
        ).log_posterior
        log_p = jnp.concatenate([jnp.full((split, num_states), log_uniform), belief])

        impossible = [_no_distribution(rows).reshape(-1) for rows in matrices(header)]
        impossible = jnp.concatenate(impossible)
        flagged = jnp.cumsum(impossible) > 0
        flagged = jnp.pad(flagged, (0, len(observed)), mode="edge")
        return jnp.where(flagged[:, None], jnp.nan, log_p)

    def sample(key: jax.Array) -> Batch:
        row_key, start_key, step_key, observation_key = jax.random.split(key, 4)
        # Dirichlet(1) is exponentials over their sum.
        rows = [
            jax.vmap(round_to_hundredths)(draws / jnp.sum(draws, axis=1, keepdims=True))
            for draws in matrices(jax.random.exponential(row_key, (split,)))
        ]
        header = jnp.concatenate([matrix.reshape(-1) for matrix in rows])
        log_transition, log_emission = log_matrices(header)
        start = jax.random.randint(start_key, (), 0, num_states)
        # Where each state would go at each step; the scan only selects.
        goes_to = jax.random.categorical(
            step_key, log_transition, shape=(num_observations, num_states)
        ).astype(start.dtype)
        _, states = jax.lax.scan(lambda z, to: (to[z], z), start, goes_to)
        observed = jax.random.categorical(observation_key, log_emission[states])
        tokens = jnp.concatenate([header, NUM_NUMBERS + observed.astype(jnp.int32)])
        weights = jnp.asarray(asked, jnp.float32)
        return Batch(tokens, jnp.exp(log_belief(tokens)), weights)

    def bayes(batch: Batch) -> jax.Array:
        chex.assert_shape(batch.inputs, asked.shape)
        return log_belief(batch.inputs)

    return Task(sample, bayes)


def labelled(transition: np.ndarray, emission: np.ndarray) -> np.ndarray:
    """Returns labelled matrices of a chain that emits from the state it leaves.

    T^(o)_ij = E_io P_ij

    Args:
      transition: P (S, S), rows sum to 1.
      emission: E (S, O), rows sum to 1.

    Returns:
      T (O, S, S), float64; summed over symbols it is P.
    """
    transition = np.asarray(transition, np.float64)
    emission = np.asarray(emission, np.float64)
    chex.assert_shape([transition, emission], [(len(emission),) * 2, (None, None)])
    return emission.T[:, :, None] * transition[None]


def mess3(x: float = 0.05, a: float = 0.85) -> np.ndarray:
    """Returns a process of three similar states: beliefs about them form a fractal.

    T^(o)_ij = (1 - 2x if i = j else x) (a if o = j else (1 - a) / 2)

    The symbol shows the state that is entered, not, as in `labelled`, the one left.

    Args:
      x: probability of a move to each other state, in [0, 1/2].
      a: probability that the symbol is the state's own, in [0, 1].

    Returns:
      T (3, 3, 3), float64.

    Source: Shai et al. 2024, arXiv 2405.15943, from where x and a are too.
    """
    transition = np.where(np.eye(3), 1 - 2 * x, x)
    emission = np.where(np.eye(3), a, (1 - a) / 2)
    return emission.T[:, None, :] * transition[None]


# Labelled matrices (O, S, S).
PROCESSES: dict[str, np.ndarray] = {
    "mess3": mess3(),
    # 0, then 1, then a fair coin, and again.
    "zero_one_random": np.array(
        [
            [[0, 1, 0], [0, 0, 0], [0.5, 0, 0]],
            [[0, 0, 0], [0, 0, 1], [0.5, 0, 0]],
        ]
    ),
    # Ones come in runs of even length: they alone lead to state 1 and back.
    "even": np.array([[[0.5, 0], [0, 0]], [[0, 0.5], [1, 0]]]),
}


def log_beliefs(process: np.ndarray, symbols: jax.Array) -> jax.Array:
    """Computes exact beliefs of an observer who knows the process, from its symbols.

    η_t ∝ η_{t-1} T^(o_t), where η_0 is the stationary distribution

    Args:
      process: labelled matrices T (O, S, S), such as PROCESSES["mess3"].
      symbols: o (T,), integers.

    Returns:
      log η_t = log p(z_{t+1} | o_1..o_t) (T, S), in nats: about the state from which
      the next symbol comes. NaN from the first symbol on that is impossible.

    Source: Shai et al. 2024, arXiv 2405.15943.
    """
    chex.assert_rank([process, symbols], [3, 1])
    start = markov.stationary_distribution(np.sum(process, axis=0))
    return markov.labelled_filter(
        jnp.log(jnp.asarray(start, float)),
        jnp.log(jnp.asarray(process, float)),
        symbols,
    )


def fixed_hmm(*, process: str, length: int) -> Task:
    """Returns the task of predicting the next symbol of a stationary process.

    p(o_{t+1} | o_1..o_t) = Σ_ij η_t,i T^(o_{t+1})_ij, with η_t as in `log_beliefs`

    Args:
      process: one of PROCESSES, with O symbols.
      length: T, at least 1; the last target is symbol T + 1.

    Returns:
      Task; inputs o_1..o_T, targets o_2..o_{T+1}, both 0..O-1, so C = O; all positions
      count. For a causal model: o_{t+1} is the target at t.

    Raises:
      ValueError: no such process, or a length below 1.
    """
    check_size("length", length, 1)
    if process not in PROCESSES:
        raise ValueError(f"process={process!r}: must be one of {', '.join(PROCESSES)}")
    matrices = PROCESSES[process]
    num_states = matrices.shape[1]
    stationary = markov.stationary_distribution(matrices.sum(axis=0))
    # From each state: every symbol with every next state, (S, O S).
    moves = matrices.transpose(1, 0, 2).reshape(num_states, -1)

    def sample(key: jax.Array) -> Batch:
        start_key, step_key = jax.random.split(key)
        log_start = jnp.log(jnp.asarray(stationary, float))
        # What each state would emit at each step; the scan only selects.
        choice = jax.random.categorical(
            step_key,
            jnp.log(jnp.asarray(moves, float)),
            shape=(length + 1, num_states),
        )
        start = jax.random.categorical(start_key, log_start)

        def step(state, choice):
            symbol, state = jnp.divmod(choice[state], num_states)
            return state, symbol

        symbols = jax.lax.scan(step, start, choice)[1].astype(jnp.int32)
        return Batch(symbols[:-1], symbols[1:])

    def bayes(batch: Batch) -> jax.Array:
        log_belief = log_beliefs(matrices, batch.inputs)
        log_emission = jnp.log(jnp.asarray(matrices.sum(axis=2), float))  # (O, S)
        return jax.nn.logsumexp(log_belief[:, None] + log_emission[None], axis=2)

    return Task(sample, bayes)


HMM_SPEC = TaskSpec(
    build=lambda fields, _: hmm(
        num_states=fields["num_states"],
        num_symbols=fields["num_symbols"],
        num_observations=fields["num_observations"],
    ),
    fields={
        "num_states": integer(2, 1000),
        "num_symbols": integer(2, 1000),
        "num_observations": integer(1, 1_000_000),
    },
    positions=lambda fields: num_positions(
        fields["num_states"], fields["num_symbols"], fields["num_observations"]
    ),
    num_classes=lambda fields: fields["num_states"],
    note="Targets are exact beliefs about the hidden state: the loss is the"
    " cross-entropy to them.",
    head=False,
    transformer=TransformerSpec(
        num_tokens=lambda fields: num_tokens(fields["num_symbols"]),
        scored=lambda fields: fields["num_observations"],
        position_name="observation",
        keys=lambda fields: Keys(
            0,
            NUM_NUMBERS,
            header_length(fields["num_states"], fields["num_symbols"]),
        ),
        longer="num_observations",
        wrong=lambda fields: next(
            (
                (name, "at most 20: no probability is below a twentieth")
                for name in ("num_states", "num_symbols")
                if fields[name] * SMALLEST > 100
            ),
            None,
        ),
    ),
)

FIXED_HMM_SPEC = TaskSpec(
    build=lambda fields, _: fixed_hmm(
        process=fields["process"], length=fields["length"]
    ),
    fields={"process": one_of(PROCESSES), "length": integer(2, 1_000_000)},
    positions=lambda fields: fields["length"],
    num_classes=lambda fields: len(PROCESSES[fields["process"]]),
    head=False,
    transformer=TransformerSpec(
        num_tokens=lambda fields: len(PROCESSES[fields["process"]]),
        scored=lambda fields: fields["length"],
        position_name="symbol",
        keys=lambda fields: Keys(
            0, len(PROCESSES[fields["process"]]), fields["length"]
        ),
        log_beliefs=lambda fields, tokens: log_beliefs(
            PROCESSES[fields["process"]], tokens
        ),
        longer="length",
    ),
)
