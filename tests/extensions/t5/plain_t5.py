"""T5 written out in plain PyTorch, with the weights of our list of layers by name."""

import math

import torch
import torch.nn.functional as F


class PlainT5:
    """Encoder and decoder with learned positions and GELU (erf).

    Args:
        weights: parameters by their names in the list of layers.
        heads: number of attention heads.
        encoder, decoder: numbers of the transformer layers of each stack in the list.
    """

    def __init__(self, weights, *, heads, encoder, decoder):
        self.weights, self.heads, self.encoder, self.decoder = weights, heads, encoder, decoder

    def logits(self, tokens, length, decoder_tokens):
        """Return [d, V] of one sample: `length` of its tokens are real."""
        words = self.weights["tied_modules.embed.word_embeddings.weight"]
        positions = self.weights["tied_modules.positions.shared_positions.weight"]
        seen = torch.arange(len(tokens)) < length
        x = words[tokens] + positions[: len(tokens)]
        for number in self.encoder:
            x = x + self._self_attention(number, x, seen.expand(len(tokens), -1))
            x = x + self._mlp(number, self._norm(f"{number}.post_attention_layernorm", x))
        last = self.encoder[-1] + 1
        encoded = self._norm(f"{last}.final_layernorm", x)
        d = len(decoder_tokens)
        x = words[decoder_tokens] + positions[:d]
        for number in self.decoder:
            x = x + self._self_attention(number, x, torch.ones(d, d).tril().bool())
            query = self._norm(f"{number}.post_attention_layernorm", x)
            x = x + self._cross_attention(number, query, encoded, seen.expand(d, -1))
            x = x + self._mlp(number, self._norm(f"{number}.post_inter_attention_layernorm", x))
        x = self._norm(str(self.decoder[-1] + 2), x)
        return x @ words.T + self.weights[f"{self.decoder[-1] + 4}.output_bias"]

    def _linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name, x):
        return F.layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        )

    def _mlp(self, number, x):
        inner = F.gelu(self._linear(f"{number}.mlp.dense_h_to_4h", x))
        return self._linear(f"{number}.mlp.dense_4h_to_h", inner)

    def _self_attention(self, number, x, seen):
        normed = self._norm(f"{number}.input_layernorm", x)
        projected = self._linear(f"{number}.self_attention.query_key_value", normed)
        query, key, value = projected.unflatten(-1, (self.heads, 3, -1)).unbind(2)
        return self._linear(f"{number}.self_attention.dense", _mixed(query, key, value, seen))

    def _cross_attention(self, number, x, encoded, seen):
        query = self._linear(f"{number}.inter_attention.query", x).unflatten(-1, (self.heads, -1))
        projected = self._linear(f"{number}.inter_attention.key_value", encoded)
        key, value = projected.unflatten(-1, (self.heads, 2, -1)).unbind(2)
        return self._linear(f"{number}.inter_attention.dense", _mixed(query, key, value, seen))


def _mixed(query, key, value, seen):
    """Return [s, heads * features] of query [s, heads, features] and keys [t, heads, features]."""
    scores = torch.einsum("sad,tad->ast", query, key) / math.sqrt(query.size(-1))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("ast,tad->sad", weights, value).flatten(1)
