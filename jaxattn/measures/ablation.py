"""Ablation of a transformer: KL to Bayes without each part."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.models import transformer
from jaxattn.models.transformer import Architecture
from jaxattn.theory import losses


def without_parts(
    architecture: Architecture,
    params: transformer.Params,
    activations: transformer.Activations,
    inputs: jax.Array,
    weights: jax.Array,
    log_bayes: jax.Array,
) -> dict[str, jax.Array]:
    """Computes KL to Bayes without each head, each MLP, each layer, in bits.

    A part is replaced by zero, or by its mean over sequences and positions.

    Args:
      architecture: of L layers of H heads.
      params: of the model.
      activations: on the sequences, with all parts in place.
      inputs: N sequences.
      weights: of positions (N, T).
      log_bayes: nats (N, T, C).

    Returns:
      head_HOW_kl_bits (L, H), and heads_, mlp_ (if there are MLPs) and layer_ likewise
      (L,), HOW being zeroed or averaged.
    """
    depth, num_heads = architecture.depth, architecture.heads
    has_mlp = bool(activations.mlp)
    contexts = jnp.stack(
        [jnp.mean(layer.context, axis=(0, 1)) for layer in activations.heads]
    )
    mlps = jnp.zeros((depth, architecture.width), contexts.dtype)
    if has_mlp:
        mlps = jnp.stack([jnp.mean(x, axis=(0, 1)) for x in activations.mlp])

    one_head = np.eye(depth * num_heads, dtype=bool).reshape(-1, depth, num_heads)
    one_layer = np.eye(depth, dtype=bool)
    heads = np.concatenate(
        [
            one_head,
            np.repeat(one_layer[:, :, None], num_heads, axis=2),
            np.zeros((depth, depth, num_heads), bool),
            np.repeat(one_layer[:, :, None], num_heads, axis=2),
        ]
    )
    none = np.zeros((depth * (num_heads + 1), depth), bool)
    of_mlp = np.concatenate([none, one_layer, one_layer])

    def without(scale: float) -> jax.Array:
        def one(parts) -> jax.Array:
            ablation = transformer.Ablation(*parts, scale * contexts, scale * mlps)

            def logit(x: jax.Array) -> jax.Array:
                return transformer.apply(
                    architecture, params, x, ablation=ablation
                ).logit

            logits = jax.vmap(logit)(inputs)
            kl = jax.vmap(losses.kl_to_bayes)(log_bayes, logits, weights)
            return jnp.mean(kl) / math.log(2)

        return jax.lax.map(one, (jnp.asarray(heads), jnp.asarray(of_mlp)))

    found = {}
    for how, scale in (("zeroed", 0.0), ("averaged", 1.0)):
        kl = without(scale)
        of_head, of_heads, of_mlps, of_layers = jnp.split(
            kl, depth * (num_heads + np.arange(3))
        )
        found[f"head_{how}_kl_bits"] = of_head.reshape(depth, num_heads)
        found[f"heads_{how}_kl_bits"] = of_heads
        if has_mlp:
            found[f"mlp_{how}_kl_bits"] = of_mlps
        found[f"layer_{how}_kl_bits"] = of_layers
    return found
