"""The emulated autocast saves for the backward exactly what CUDA's own autocast saves, as fake CUDA tensors show
without a GPU."""

import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from dit.model import DiT_models
from dit.planner.emulation import Emulation, MetaScaler

FLASH = torch.ops.aten._scaled_dot_product_flash_attention


def saved_by(forward) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """What autograd keeps of ``forward()``, in order; parameters included, since their views and casts are kept too."""
    saved = []

    def pack(tensor):
        saved.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return saved


def inputs(device: str, batch: int = 3):
    x = torch.empty(batch, 4, 32, 32, device=device)
    t, y = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    return x, t, y, torch.empty(batch, dtype=torch.bool, device=device)


def emulated(name: str, dtype: torch.dtype):
    with torch.device("meta"):
        model = DiT_models[name](input_size=32).train()

    def forward():
        with Emulation("cuda", dtype, lambda query: "flash"):
            model(*inputs("meta"))

    return saved_by(forward)


def on_fake_cuda(name: str, dtype: torch.dtype, monkeypatch):
    """The forward with CUDA's autocast forced on. Attention is forced too: without a GPU torch would take the math
    path."""
    def flash(query, key, value, **kwargs):
        return FLASH(query, key, value)[0]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", flash)
    with torch.device("meta"):
        model = DiT_models[name](input_size=32).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    on_cuda = torch.empty(parameter.shape, device="cuda")
                    module._parameters[key] = nn.Parameter(on_cuda, requires_grad=parameter.requires_grad)

        def forward():
            enabled, default = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", dtype)
            torch.autocast_increment_nesting()
            try:
                model(*inputs("cuda"))
            finally:
                if torch.autocast_decrement_nesting() == 0:
                    torch.clear_autocast_cache()
                torch.set_autocast_enabled("cuda", enabled)
                torch.set_autocast_dtype("cuda", default)

        return saved_by(forward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["DiT-S/2", "DiT-B/4", "DiT-XL/2"])
def test_saved_tensors_are_those_of_cudas_autocast(name, dtype, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = on_fake_cuda(name, dtype, monkeypatch)
    ours = emulated(name, dtype)
    assert Counter(dtype for dtype, _ in ours) == Counter(dtype for dtype, _ in real)
    assert ours == real


def test_without_autocast_nothing_is_cast(monkeypatch):
    with torch.device("meta"):
        model = DiT_models["DiT-S/8"](input_size=32).train()

    def forward():
        with Emulation("cuda", None, lambda query: "efficient"):
            model(*inputs("meta"))

    assert torch.bfloat16 not in {dtype for dtype, _ in saved_by(forward)}


def test_weights_are_cast_once_per_region():
    weight = torch.empty(8, 8, device="meta", requires_grad=True)
    x = torch.empty(2, 8, device="meta")
    casts = []
    emulation = Emulation("cuda", torch.bfloat16, lambda query: "flash", casts.append)
    for _ in range(2):
        with emulation:
            functional.linear(functional.linear(x, weight), weight)
    assert len(casts) == 2 and all(cast.dtype is torch.bfloat16 for cast in casts)


def test_products_are_lowered_and_norms_raised():
    x = torch.empty(2, 4, 8, device="meta", dtype=torch.bfloat16)
    with Emulation("cuda", torch.bfloat16, lambda query: "flash"):
        assert functional.layer_norm(x, (8,)).dtype is torch.float32
        assert (x.float() @ x.float().transpose(1, 2)).dtype is torch.bfloat16
        assert functional.gelu(x).dtype is torch.bfloat16
        assert (x + x.float()).dtype is torch.float32
    with Emulation("cpu", torch.bfloat16, lambda query: "flash_cpu"):
        assert functional.layer_norm(x, (8,)).dtype is torch.bfloat16


def test_the_scaler_does_a_real_scalers_operations():
    scaler = MetaScaler(True, torch.device("cpu"))
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale((parameter * 2).sum()).backward()
    assert parameter.grad.tolist() == [2 * 65536.0] * 3
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [2.0] * 3
    scaler.update()
    loss = torch.ones(())
    assert MetaScaler(False, torch.device("cpu")).scale(loss) is loss
