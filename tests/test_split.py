"""Nothing depends on how a batch is split over processes and micro-batches, nor on a change of that at a resume."""

import pytest
import sessions
import torch
from faultlog import record
from forked import run_ranks
from test_resume import SMALL
from torch.utils._python_dispatch import TorchDispatchMode

import dit.step
from dit.codec import build_codec
from dit.config import replace
from dit.config_files import load_toml
from dit.data import build_dataset, micro_batches
from dit.parallel import Ranks, wrap_ddp
from dit.precision import resolve
from dit.saving import named_tensors
from dit.step import build_parts, train_step

LAYOUTS = {"1 x 8 x 1": (1, 1), "1 x 2 x 4": (1, 4), "2 x 4 x 1": (2, 1), "2 x 2 x 2": (2, 2)}
"""Processes x micro-batch x accumulation."""
CPU = Ranks(0, 0, 1, torch.device("cpu"))


def session(folder, layout, max_steps):
    world_size, accumulation = LAYOUTS[layout]
    args = (*SMALL, "--log-every", 1000, "--ckpt-every", 1000, "--grad-accum", accumulation, "--max-steps", max_steps)
    if world_size == 1:
        return sessions.run(folder, *args)
    return sessions.run_ranks(folder, world_size, *args)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run with one process and the whole batch at once."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    session(folder, "1 x 8 x 1", 30)
    return folder


@pytest.mark.parametrize("layouts", [["1 x 2 x 4"], ["2 x 4 x 1"], ["2 x 2 x 2"],
                                     ["1 x 8 x 1", "2 x 2 x 2", "1 x 2 x 4"]], ids=", then ".join)
def test_the_losses_are_those_of_the_whole_batch(whole, tmp_path, layouts):
    for index, layout in enumerate(layouts, start=1):
        session(tmp_path / "run", layout, 30 * index // len(layouts))
    one, other = sessions.logged(whole), sessions.logged(tmp_path / "run")
    assert [record["step"] for record in other] == list(range(30))
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in other] == pytest.approx([record[key] for record in one], rel=1e-4)
    final, same = (dict(named_tensors(sessions.state(folder, 30)["ema"])) for folder in (tmp_path / "run", whole))
    assert all(torch.allclose(final[name], same[name], atol=2e-5) for name in same)
    record("another split", ", then ".join(layouts), after="30 steps", lost="nothing (losses within 1e-4)")


def test_checkpointing_with_two_ranks_and_accumulation_changes_nothing(whole, tmp_path):
    sessions.run_ranks(tmp_path / "run", 2, *SMALL, "--log-every", 1000, "--grad-accum", 2, "--ckpt", "--max-steps", 10)
    one, other = sessions.logged(whole)[:10], sessions.logged(tmp_path / "run")
    assert [each["loss"] for each in other] == pytest.approx([each["loss"] for each in one], rel=1e-4)


def parts_of(config, ranks):
    """What a step works on, its output layers no longer zero so that every weight has a gradient."""
    torch.manual_seed(0)
    parts = build_parts(config, ranks.device, build_codec("none"), resolve(config, ranks.device),
                        lambda model: wrap_ddp(model, ranks))
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return parts


def steps_of(ranks, config, num_steps):
    """Run steps. Returns the gradients of the last, the exchanges of gradients, and the reads of the device by host."""
    gradients, exchanges = {}, []
    parts = parts_of(config, ranks)
    if ranks.world_size > 1:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def counted(state, bucket):
            exchanges.append(bucket.index())
            return allreduce_hook(state, bucket)

        parts.network.register_comm_hook(None, counted)
    update = dit.step._update

    def noted(parts, lr):
        gradients.update({name: parameter.grad.clone() for name, parameter in parts.model.named_parameters()
                          if parameter.grad is not None})
        return update(parts, lr)

    dit.step._update = noted
    try:
        batches = micro_batches(build_dataset(config), start_step=0, global_batch=config.memory.global_batch_size,
                                accumulation=config.memory.grad_accum, rank=ranks.rank, world_size=ranks.world_size)
        with CountReads() as reads:
            for step in range(num_steps):
                if step and ranks.device.type == "cuda":  # the first step may prepare things
                    torch.cuda.set_sync_debug_mode("error")
                train_step(parts, batches, config.memory.grad_accum, lr=1e-3, ema_decay=0.9)
    finally:
        dit.step._update = update
        if ranks.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return gradients, exchanges, reads.names


class CountReads(TorchDispatchMode):
    """Notes the operations with which the host waits for numbers of the device: .item(), bool(), nonzero ..."""

    READS = {f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")}

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if name in self.READS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def config_of(**changes):
    return replace(load_toml(sessions.ROOT / "configs" / "tiny.toml"), global_batch_size=8, depth=1, hidden_size=32,
                   **changes)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4)])
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, world_size, accumulation):
    whole, _, _ = steps_of(CPU, config_of(), 1)
    config = config_of(grad_accum=accumulation)
    if world_size == 1:
        found = [steps_of(CPU, config, 1)]
    else:
        found = run_ranks(world_size, steps_of, config, 1, folder=tmp_path)
    for gradients, _, _ in found:
        assert gradients.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)


def test_ranks_exchange_gradients_once_a_step_however_many_micro_batches(tmp_path):
    once, often = (run_ranks(2, steps_of, config_of(grad_accum=accumulation), 3, folder=tmp_path)
                   for accumulation in (1, 4))
    assert [len(exchanges) for _, exchanges, _ in often] == [len(exchanges) for _, exchanges, _ in once]
    assert all(exchanges for _, exchanges, _ in once)


PRECISIONS = pytest.mark.parametrize("changes", [
    {}, {"amp": True}, {"amp": True, "amp_dtype": "fp16", "clip_grad": 1.0}, {"ckpt": True, "grad_accum": 2}], ids=str)


@PRECISIONS
def test_no_step_waits_for_the_device(changes):
    assert steps_of(CPU, config_of(**changes), 2)[2] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@PRECISIONS
def test_no_step_waits_for_the_gpu(changes):
    steps_of(Ranks(0, 0, 1, torch.device("cuda", 0)), config_of(**changes), 3)  # torch raises where one waits


def test_the_count_of_reads_counts():
    with CountReads() as reads:
        torch.ones(()).item()
        if torch.ones(()) > 0:
            torch.ones(2).nonzero()
    assert reads.names == ["aten::_local_scalar_dense", "aten::_local_scalar_dense", "aten::nonzero"]


def test_gradients_are_views_of_the_buckets(tmp_path):
    assert run_ranks(2, bucket_view, folder=tmp_path) == [True, True]


def bucket_view(ranks):
    return parts_of(config_of(), ranks).network.gradient_as_bucket_view
