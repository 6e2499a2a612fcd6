"""Retro written out in plain PyTorch: a loop over samples, chunks, neighbors and positions."""

import math

import torch
import torch.nn.functional as F


class PlainRetro:
    """Decoder with learned positions, GELU (erf), chunked cross-attention and an encoder.

    Args:
        weights: parameters by their names in the list of layers.
        spec: the sizes of the network.
    """

    def __init__(self, weights, spec):
        self.weights, self.spec = weights, spec
        self.heads = spec.attention.num_attention_heads

    def logits(self, tokens, neighbors, lengths):
        """Return [s, V] of one sample with neighbors [c][k][r], of which `lengths` [c][k] are real."""
        spec, s, m = self.spec, len(tokens), self.spec.own.retro_chunk_length
        first = s - (len(neighbors) - 1) * m
        x = self._embedded(tokens)
        contexts = None
        for number in range(1, spec.num_layers + 1):
            name = str(number + 2)
            x = x + self._self_attention(name, x, torch.ones(s, s).tril().bool())
            if number in spec.own.retro_layers:
                h = self._norm(f"{name}.pre_inter_attention_layernorm", x)
                if contexts is None:
                    contexts = [
                        self._context(
                            f"{name}.encoder.layers",
                            h[max(0, first + (i - 1) * m) : first + i * m],
                            neighbors[i],
                            lengths[i],
                        )
                        for i in range(len(neighbors))
                    ]
                x = x + self._chunked(name, h, contexts, first)
            x = x + self._mlp(name, x)
        x = self._norm(str(spec.num_layers + 4), x)
        return x @ self.weights["tied_modules.embed.word_embeddings.weight"].T

    def _chunked(self, name, h, contexts, first):
        added = torch.zeros_like(h)
        for t in range(first - 1, len(h)):
            context = contexts[(t - first + 1) // self.spec.own.retro_chunk_length]
            if len(context):
                added[t] = self._cross_attention(name, h[t : t + 1], context)[0]
        return added * self.spec.own.retro_attention_gate

    def _context(self, prefix, chunk, neighbors, lengths):
        """Return the encoded real tokens of the neighbors of one chunk."""
        encoded = []
        for neighbor, length in zip(neighbors, lengths, strict=True):
            if length == 0:
                continue
            x = self._embedded(neighbor[:length])
            for layer in range(self.spec.own.retro_encoder_layers):
                name = f"{prefix}.{layer}"
                x = x + self._self_attention(name, x, torch.ones(len(x), len(x)).bool())
                if layer == 0:
                    h = self._norm(f"{name}.pre_inter_attention_layernorm", x)
                    x = x + self._cross_attention(name, h, chunk)
                x = x + self._mlp(name, x)
            encoded.append(x)
        return torch.cat(encoded) if encoded else []

    def _embedded(self, tokens):
        words = self.weights["tied_modules.embed.word_embeddings.weight"]
        positions = self.weights["tied_modules.embed.position_embeddings.weight"]
        return words[tokens] + positions[: len(tokens)]

    def _linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name, x):
        return F.layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        )

    def _mlp(self, name, x):
        normed = self._norm(f"{name}.post_attention_layernorm", x)
        inner = F.gelu(self._linear(f"{name}.mlp.dense_h_to_4h", normed))
        return self._linear(f"{name}.mlp.dense_4h_to_h", inner)

    def _self_attention(self, name, x, seen):
        normed = self._norm(f"{name}.input_layernorm", x)
        projected = self._linear(f"{name}.self_attention.query_key_value", normed)
        query, key, value = projected.unflatten(-1, (self.heads, 3, -1)).unbind(2)
        return self._linear(f"{name}.self_attention.dense", _mixed(query, key, value, seen))

    def _cross_attention(self, name, x, context):
        query = self._linear(f"{name}.inter_attention.query", x).unflatten(-1, (self.heads, -1))
        projected = self._linear(f"{name}.inter_attention.key_value", context)
        key, value = projected.unflatten(-1, (self.heads, 2, -1)).unbind(2)
        seen = torch.ones(len(x), len(context)).bool()
        return self._linear(f"{name}.inter_attention.dense", _mixed(query, key, value, seen))


def _mixed(query, key, value, seen):
    """Return [s, heads * features] of query [s, heads, features] and keys [t, heads, features]."""
    scores = torch.einsum("sad,tad->ast", query, key) / math.sqrt(query.size(-1))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("ast,tad->sad", weights, value).flatten(1)
