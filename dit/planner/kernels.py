"""Memory that kernels take inside themselves and give back before they return, which no tensor of the step shows."""

from torch import Tensor

from dit.planner.record import Internal


def internals(device_kind: str) -> Internal:
    """The temporaries of ``device_kind``'s kernels, for :class:`dit.planner.record.Recorder`."""
    return lambda func, args, kwargs, outputs: []
