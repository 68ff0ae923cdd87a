"""The average of the weights in host memory (``--ema host``): 4 bytes a parameter less on the device.

The same averages as ``dit.ema`` keeps, to the last bit on a CPU. After every step the weights are copied to the host,
beside the next step's forward and backward, and a thread averages them there. The host holds the averages and a buffer
for the copy (pinned on a GPU machine): 8 bytes a parameter. A step that is shorter than copy and averaging waits for
them: about 4 bytes a parameter over the link to the host, and 12 through its memory.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dit.local_shards import local


class HostEma:
    """Averages of a model's trainable parameters, fp32, on the host; of sharded ones, of this process's parts.

    Interchangeable with ``dit.ema.Ema``. Of a model on the meta device it holds nothing, as it would on the device.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._sources = {name: parameter for name, parameter in model.named_parameters()
                         if parameter.requires_grad and not parameter.is_meta}
        first = next((local(source) for source in self._sources.values()), None)
        self._cuda = first is not None and first.is_cuda
        self._stream = torch.cuda.Stream(first.device) if self._cuda else None
        with torch.device("cpu"):
            self.averages = {name: torch.empty_like(local(source), device="cpu").copy_(local(source))
                             for name, source in self._sources.items()}
            self._copies = {name: torch.empty(average.shape, dtype=average.dtype, pin_memory=self._cuda)
                            for name, average in self.averages.items()}
            self._skip = torch.zeros((), pin_memory=self._cuda)
        self._copied: torch.cuda.Event | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ema")
        self._averaging: Future | None = None

    def hold_weights(self) -> None:
        """The weights are about to change: let the device first finish copying those of the last step."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    @torch.no_grad()
    def update(self, decay: float, skip: Tensor) -> None:
        """``average += (1 - decay) * (parameter - average)``, and nothing where the scalar float tensor ``skip`` is 1.

        Returns once the copy is under way; waits for the averaging of the update before.
        """
        if not self._sources:
            return
        self._finish()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            skip.record_stream(self._stream)
        with torch.cuda.stream(self._stream):  # None on a CPU: then this is no context, and the copies are done at once
            for name, source in self._sources.items():
                self._copies[name].copy_(local(source), non_blocking=True)
            self._skip.copy_(skip, non_blocking=True)
        self._copied = self._stream.record_event() if self._stream is not None else None
        self._averaging = self._thread.submit(self._average, decay, self._copied)

    @torch.no_grad()
    def _average(self, decay: float, copied: "torch.cuda.Event | None") -> None:
        if copied is not None:
            copied.synchronize()
        torch._fused_sgd_(list(self.averages.values()), list(self._copies.values()), [],  # see Ema.update
                          lr=1.0 - decay, weight_decay=1.0, maximize=True, momentum=0.0, dampening=0.0, nesterov=False,
                          is_first_step=False, grad_scale=None, found_inf=self._skip)

    def _finish(self) -> None:
        """Wait for the averaging under way; raises what went wrong in it."""
        if self._averaging is not None:
            averaging, self._averaging = self._averaging, None
            averaging.result()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model carries the averages inside this context, and its own weights after it; these wait on the host."""
        self._finish()
        self._copy(self._weights(), self._copies)
        self._copy(self.averages, self._weights())
        self._forget_gathered()
        try:
            yield
        finally:
            self._copy(self._copies, self._weights())
            self._forget_gathered()

    def _weights(self) -> dict[str, Tensor]:
        return {name: local(source) for name, source in self._sources.items()}

    @staticmethod
    @torch.no_grad()
    def _copy(sources: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
        for name, source in sources.items():
            targets[name].copy_(source)

    def _forget_gathered(self) -> None:
        if hasattr(self._model, "reshard"):
            self._model.reshard()  # FSDP keeps what lies outside of the blocks gathered after a forward

    def state_dict(self) -> dict[str, Tensor]:
        self._finish()
        return dict(self.averages)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy averages in. Raises KeyError where one is missing; entries without an average (frozen) are ignored."""
        self._finish()
        self._copy({name: state[name] for name in self.averages}, self.averages)
