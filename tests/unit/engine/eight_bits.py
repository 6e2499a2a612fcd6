"""Adam with states in 8 bits that keeps and saves them in the form of bitsandbytes' (0.50)."""

import copy

import torch

BLOCK, LEAST = 256, 64
NESTED = "__bnb_optimizer_quant_state__"
TENSORS = ("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2")


class AdamW8bit(torch.optim.Optimizer):
    """Small parameters have states in 32 bits; those of others are places in a table of values."""

    def __init__(self, groups, lr, betas, eps):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.tables = {1: torch.linspace(-1, 1, 256), 2: torch.linspace(0, 1, 256) ** 2}

    def begin(self, parameter):
        """Return the state of a parameter that has taken no step."""
        kept = {"step": 0}
        for n, table in self.tables.items():
            is_small = parameter.numel() < LEAST
            dtype = torch.float32 if is_small else torch.uint8
            kept[f"state{n}"] = torch.zeros_like(parameter, dtype=dtype)
            if not is_small:
                kept[f"qmap{n}"] = table
                kept[f"absmax{n}"] = torch.zeros(-(-parameter.numel() // BLOCK))
        return kept

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if len(self.state[p]) == 0:
                    self.state[p].update(self.begin(p))
                kept, grad, moments = self.state[p], p.grad.float(), []
                kept["step"] += 1
                for n, beta, new in zip((1, 2), group["betas"], (grad, grad**2), strict=True):
                    moment = beta * self.read(kept, n) + (1 - beta) * new
                    self.write(kept, n, moment)
                    moments.append(moment / (1 - beta ** kept["step"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * moments[0] / (moments[1].sqrt() + group["eps"]))

    def read(self, kept, n):
        """Return a state as numbers."""
        state = kept[f"state{n}"]
        if state.dtype != torch.uint8:
            return state
        scale = kept[f"absmax{n}"].repeat_interleave(BLOCK)[: state.numel()]
        return (kept[f"qmap{n}"][state.flatten().long()] * scale).view(state.shape)

    def write(self, kept, n, moment):
        """Keep numbers as a state."""
        state = kept[f"state{n}"]
        if state.dtype != torch.uint8:
            state.copy_(moment)
            return
        blocks = moment.flatten().split(BLOCK)
        kept[f"absmax{n}"].copy_(torch.stack([block.abs().max() for block in blocks]))
        scale = kept[f"absmax{n}"].repeat_interleave(BLOCK)[: state.numel()].clamp_min(1e-30)
        table = kept[f"qmap{n}"]
        places = torch.bucketize(moment.flatten() / scale, table).clamp(max=255)
        state.copy_(places.view(state.shape))

    def state_dict(self):
        """Return the state with its tensors one level further down."""
        saved = super().state_dict()
        saved["state"] = {
            number: {
                **{name: value for name, value in kept.items() if name not in TENSORS},
                NESTED: {name: kept[name] for name in TENSORS if name in kept},
            }
            for number, kept in saved["state"].items()
        }
        return saved

    def load_state_dict(self, state_dict):
        """Take a state as it is: neither its places nor its table are cast."""
        given = copy.deepcopy(state_dict)
        own = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in given["param_groups"] for n in group["params"]]
        for number, p in zip(numbers, own, strict=True):
            if kept := given["state"].get(number):
                self.state[p] = {**kept, **kept.pop(NESTED)}
        for group, output in zip(self.param_groups, given["param_groups"], strict=True):
            group.update({name: value for name, value in output.items() if name != "params"})
