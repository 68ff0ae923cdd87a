"""The exponential moving average of the weights: what is sampled from and evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dit.local_shards import is_sharded, local


def warmed_up_decay(decay: float, step: int) -> float:
    """``min(decay, (1 + step) / (10 + step))``: a short run's average is not mostly initial weights."""
    return min(decay, (1 + step) / (10 + step))


class Ema:
    """Averages of a model's trainable parameters, fp32, on the parameters' device. Frozen ones have no average.

    Of a parameter that several processes hold between them, each averages its part.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._sources = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.averages = {name: local(source).clone() for name, source in self._sources.items()}

    def hold_weights(self) -> None:
        """The weights are about to change; here nobody still reads those of the last step."""

    @torch.no_grad()
    def update(self, decay: float, skip: Tensor) -> None:
        """``average += (1 - decay) * (parameter - average)``, and nothing where the scalar float tensor ``skip`` is 1.

        This is ascent on the parameters with weight decay 1, so torch's fused SGD kernel does it in one pass over all
        tensors, without temporaries, and honours ``skip`` without asking the device for it.
        """
        torch._fused_sgd_(list(self.averages.values()), [local(source) for source in self._sources.values()], [],
                          lr=1.0 - decay, weight_decay=1.0, maximize=True, momentum=0.0, dampening=0.0, nesterov=False,
                          is_first_step=False, grad_scale=None, found_inf=skip)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model carries the averages inside this context, and its own weights after it.

        No memory is copied, except for sharded parameters, whose memory FSDP keeps hold of.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, source in self._sources.items():
            if is_sharded(source):
                part = local(source)
                own = part.clone()
                part.copy_(self.averages[name])
                self.averages[name].copy_(own)
            else:
                source.data, self.averages[name] = self.averages[name], source.data
        if hasattr(self._model, "reshard"):
            self._model.reshard()  # FSDP keeps what lies outside of the blocks gathered after a forward

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.averages)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy averages in. Raises KeyError where one is missing; entries without an average (frozen) are ignored."""
        for name, average in self.averages.items():
            average.copy_(state[name])
