"""Plan a run before it starts: does it fit, how long does a step take, what does the whole run need and cost.

    python scripts/plan.py --model DiT-XL/2 --amp --ckpt --device A100-80GB --num-devices 8

takes every flag of train.py, any device of the catalogue whether it is here or not, and prints a table or, with --json,
plan.json.

    python scripts/plan.py --model DiT-L/4 --device RTX-4090 --compare "" "--amp" "--amp --ckpt"

puts configurations side by side: each text after --compare is a line of flags over the ones before it.

    python scripts/plan.py --recommend --goal cost --model DiT-XL/2 --device RTX-4090 --device H100 --max-hours 240

searches what can be chosen on one or several candidate devices and says what to run, and why.

    python scripts/plan.py --model DiT-XL/2 --amp --device A100 --num-devices 8 --scaling

says what 1, 2, 4, ..., 1024 devices would give.
"""

import atexit
import dataclasses
import gc
import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from dit.cli import parse_flags, run, settle, take_flag, take_flags
from dit.config import PRESETS, TrainConfig, UsageError, replace
from dit.config_checks import validate
from dit.config_files import load_toml
from dit.planner import IMAGENET_SAMPLES, Plan, alternatives, known_samples, measured_loader_rate, plan
from dit.planner.catalogue import Device
from dit.planner.hardware import cpu_device, custom_device, find_device, find_node, parse_bytes
from dit.planner.prices import given_prices
from dit.planner.what_if import side_by_side, variants
from dit.terminal import duration, show


@dataclass(frozen=True)
class PlanFlags:
    """Plan a run: every flag of train.py, and the device it is planned for."""

    train: TrainConfig = field(default_factory=TrainConfig)
    device: str | None = None
    """A device of the catalogue, present or not: H100, A100-80GB, RTX 4090, cpu (this one). Default: what is here. With
    --recommend it may be given several times."""
    num_devices: int = 1
    """Devices that share the work."""
    device_memory: str | None = None
    """Memory of the device, instead of the catalogue's or for a card it does not know: 24GiB, 80e9."""
    price_per_device_hour: float | None = None
    """Price of one device for an hour, in any currency. --price H100=2.5 gives it by device; with --recommend devices
    without a given price take an assumption, which is said."""
    num_samples: int | None = None
    """Images in the data set, for the length of the run. Default: those of --data-path where it is here."""
    recommend: bool = False
    """Search devices, their number, micro-batch, accumulation, --amp, --ckpt, --attention, --parallel and latents made
    once, and say what to run and why."""
    goal: Literal["quality", "quick", "cost"] = "cost"
    """With --recommend: the largest model within the limits, the fastest run, or the cheapest."""
    max_hours: float | None = None
    """With --recommend: the run may take so long."""
    max_cost: float | None = None
    """With --recommend: the run may cost so much."""
    max_devices: int = 8
    """With --recommend: so many devices may be used."""
    scaling: bool = False
    """Print what 1, 2, 4, ..., 1024 devices give, with the same global batch and with the same micro-batch."""
    node: str | None = None
    """With --scaling: the kind of machine the devices stand in, for instance hgx-h100 or pcie4-box. Default: the usual
    one of the device."""
    json: bool = False
    """Print plan.json (with --recommend the advice, with --scaling both tables) and nothing else."""
    table: bool = False
    """Print the largest micro-batch that fits on the device: all twelve models, with and without --amp and --ckpt."""
    preflight: bool = False
    """Also look whether this machine has what the run needs: memory, disk, data, precision. Under torchrun: all
    ranks."""
    picture: str | None = None
    """Also draw the memory over a step, and one bar per combination of --amp and --ckpt, into this PNG file."""


def main(args: list[str]) -> int:
    before = args.index("--compare") if "--compare" in args else len(args)
    path, rest = take_flag(args[:before], "--config")
    names, rest = take_flags(rest, "--device")
    prices, rest = take_flags(rest, "--price")
    flags = parse_flags(PlanFlags, rest, PlanFlags(train=load_toml(path)) if path else PlanFlags(), prog="plan.py")
    _check(flags, before < len(args))
    devices = [choose_device(name, flags.device_memory) for name in names or [None]]
    given = given_prices(prices, flags.price_per_device_hour, devices)
    if flags.recommend:
        recommend(flags, devices, given)
        return 0
    if len(devices) > 1:
        raise UsageError(f"--device was given {len(devices)} times; several devices go with --recommend")
    device = devices[0]
    flags = dataclasses.replace(flags, price_per_device_hour=given.get(device.name))
    if flags.scaling:
        scale(flags, device)
        return 0
    if before < len(args):
        compare(flags, device, args[before + 1:])
        return 0
    if flags.table:
        print_fit_table(_settle(flags.train), device)
        return 0
    config = _settle(flags.train)
    with nullcontext() if flags.json else _status():
        planned = plan(config, device, flags.num_devices, num_samples=flags.num_samples or known_samples(config),
                       price_per_device_hour=flags.price_per_device_hour, loader_rate=measured_loader_rate(config))
        content = planned.to_dict()
        if planned.memory.verdict == "does_not_fit":
            content["notes"] = [*content["notes"], advice(config, device, flags.num_devices)]
    if flags.json:
        print(json.dumps(content, indent=2))
    else:
        print_plan(planned, content)
    if flags.preflight:
        check_machine(config, content)
    if flags.picture:
        from dit.planner.pictures import draw
        draw(planned, config, device, flags.num_devices, flags.picture)
        if not flags.json:
            print(flags.picture)
    return 0


def recommend(flags: PlanFlags, devices: list[Device], prices: dict[str, float]) -> None:
    """Search and print the trade-offs that are left, the choice, its reasons and the line that starts it."""
    from dit.planner import calibration
    from dit.planner.candidates import Wish
    from dit.planner.recommend import recommend as search
    from dit.planner.tables import print_advice

    config = _settle(flags.train)
    num_samples = flags.num_samples or known_samples(config) or IMAGENET_SAMPLES
    wish = Wish(goal=flags.goal, steps=config.total_steps(num_samples), max_hours=flags.max_hours,
                max_cost=flags.max_cost, max_devices=flags.max_devices, prices=prices, num_samples=num_samples)
    start = perf_counter()
    with nullcontext() if flags.json else _status():
        found = search(config, devices, wish, calibration_of=lambda device: calibration.find(device.name))
    if flags.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print_advice(found, wish, perf_counter() - start)


def scale(flags: PlanFlags, device: Device) -> None:
    """Print what more devices give, as two tables or as JSON."""
    from dit.planner import calibration
    from dit.planner.scaling import scaling
    from dit.planner.tables import print_scaling

    config = _settle(flags.train)
    steps = config.total_steps(flags.num_samples or known_samples(config) or IMAGENET_SAMPLES)
    with nullcontext() if flags.json else _status():
        found = scaling(config, device, steps, num_devices=flags.num_devices, price=flags.price_per_device_hour,
                        node=find_node(flags.node) if flags.node else None, calibration=calibration.find(device.name))
    if flags.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print_scaling(found, config, device.name)


def compare(flags: PlanFlags, device: Device, texts: list[str]) -> None:
    """Plan each configuration and print them side by side, or their plans as one JSON object."""
    if len(texts) < 2:
        raise UsageError('--compare needs two or more lines of flags after it: --compare "" "--amp"')
    plans = {}
    with nullcontext() if flags.json else _status():
        for text, config in variants(texts, flags.train).items():
            plans[text] = plan(config, device, flags.num_devices,
                               num_samples=flags.num_samples or known_samples(config),
                               price_per_device_hour=flags.price_per_device_hour,
                               loader_rate=measured_loader_rate(config)).to_dict()
    if flags.json:
        print(json.dumps(plans, indent=2))
        return
    from rich.console import Console

    from dit.planner.tables import table

    rows = [("", *plans), *side_by_side(plans)]
    Console(width=max(100, Console().width)).print(
        table(f"{flags.train.model.model} on {flags.num_devices} x {device.name}", rows))


def check_machine(config: TrainConfig, content: dict) -> None:
    """Print the preflight, a line per item. Raises UsageError for what would stop the run."""
    from dit import preflight
    from dit.parallel import processes

    with processes() as ranks:
        checks = preflight.preflight(config, None, ranks, content)
        if ranks.is_main:
            preflight.show(checks, lambda line: print(line, file=sys.stderr))
        preflight.stop(checks, config)


def _check(flags: PlanFlags, compares: bool) -> None:
    asked = [f"--{name}" for name in ("recommend", "scaling", "table") if getattr(flags, name)]
    asked += ["--compare"] * compares
    if len(asked) > 1:
        raise UsageError(f"{asked[0]} and {asked[1]} are different questions; ask one")
    if flags.num_devices < 1:
        raise UsageError(f"--num-devices {flags.num_devices}: must be at least 1")
    if flags.num_samples is not None and flags.num_samples < 1:
        raise UsageError(f"--num-samples {flags.num_samples}: must be at least 1")
    if flags.price_per_device_hour is not None and not 0 < flags.price_per_device_hour < float("inf"):
        raise UsageError(f"--price-per-device-hour {flags.price_per_device_hour}: must be a number above 0")
    if flags.recommend and flags.num_devices != 1:
        raise UsageError(f"--num-devices {flags.num_devices}: --recommend chooses it; --max-devices limits it")
    if flags.node is not None and not flags.scaling:
        raise UsageError(f"--node {flags.node} goes with --scaling")
    for name, default in (("max_hours", None), ("max_cost", None), ("goal", "cost"), ("max_devices", 8)):
        value = getattr(flags, name)
        if value != default and not flags.recommend:
            raise UsageError(f"--{name.replace('_', '-')} {value} goes with --recommend")


def _settle(config: TrainConfig) -> TrainConfig:
    """The config, checked. Where the data lie need not be known: only their shape matters here."""
    if config.data.data in ("digits", "synthetic") or config.data.data_path:
        return settle(config)
    check = validate if config.data.data == "latents" else settle  # latents that are there say which VAE made them
    return replace(check(replace(config, data_path="PATH")), data_path=None)


def choose_device(name: str | None, memory: str | None) -> Device:
    """The device to plan for. Raises UsageError for one that is unknown and whose memory is not given."""
    memory_bytes = parse_bytes(memory) if memory is not None else None
    if name is None and memory_bytes is not None:
        return custom_device(memory_bytes)
    device = present_device() if name is None else find_device(name)
    if memory_bytes is None:
        return device
    return dataclasses.replace(device, memory_bytes=memory_bytes,
                               sources={**device.sources, "memory_bytes": "--device-memory"})


def present_device() -> Device:
    """The first GPU the driver shows, else this CPU. Asks the driver itself: torch would take seconds to load."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name, total = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total
    except Exception:  # no driver, no GPU, no permission, no module: all mean that none can be used
        return cpu_device()
    try:
        return find_device(name if isinstance(name, str) else name.decode())
    except UsageError:
        return custom_device(total)


def advice(config: TrainConfig, device: Device, num_devices: int) -> str:
    """What would make a run fit that does not, how much it then uses, and by how much it misses as asked."""
    search = alternatives.what_would_fit(config, device, num_devices)

    def used(each: alternatives.Alternative) -> str:
        return f"with {each.flags}: {_range(each.memory.device_used_bytes, 'bytes')} in use"

    misses = f"As asked it misses by {show_bytes(search.asked.missing_bytes)}"
    if search.found is not None:
        said = f"{misses}. It would fit {used(search.found)}."
    elif search.closest is search.asked:
        said = f"{misses}, and no setting of the planner's makes it smaller."
    else:
        still = "can be too little by" if search.closest.memory.verdict == "tight" else "still misses by"
        said = (f"{misses}. Nothing makes it fit on {num_devices} x {device.name}: the closest, "
                f"{search.closest.flags}, {still} {show_bytes(search.closest.missing_bytes)}.")
    return said if search.spread is None else f"{said} Over more devices it would fit {used(search.spread)} on each."


# ---- for people ----

def print_plan(planned: Plan, content: Mapping[str, object]) -> None:
    """The plan as a table, then its notes."""
    from rich.console import Console
    from rich.table import Table

    config, memory, time, run = (content[name] for name in ("config", "memory", "time", "run"))
    accumulation, num_devices = config["memory"]["grad_accum"], content["num_devices"]
    table = Table(title=f"{config['model']['model']} on {num_devices} x {content['device']['name']}", show_header=False)
    rows = [("verdict", memory["verdict"].replace("_", " ")),
            ("batch", f"{planned.step.micro_batch} micro-batch x {accumulation} accumulation x {num_devices} devices = "
                      f"{config['memory']['global_batch_size']}"),
            ("memory in use", f"{_range(memory['device_used_bytes'], 'bytes')} of "
                              f"{show_bytes(content['device']['memory_bytes'])}"),
            ("allocated at the peak", f"{show_bytes(memory['peak_allocated_bytes'])}  in phase {memory['peak_phase']}"),
            ("reserved at the peak", show_bytes(memory["peak_reserved_bytes"])),
            *((f"  {name.replace('_', ' ')}", show_bytes(size)) for name, size in memory["by_category"].items()
              if size >= memory["peak_allocated_bytes"] / 500),
            ("step", _range(time["step_seconds"], "s")),
            ("images per second", _number(time["images_per_second"])),
            ("MFU", "unknown" if time["mfu"] is None else f"{time['mfu']:.1%}"),
            ("bound by", time["bound_by"] or "unknown"),
            ("steps", f"{run['steps']:,}"),
            ("whole run", _hours(run["hours"])),
            ("device-hours", _number(run["device_hours"])),
            *([("cost", _number(run["cost"]))] if run["cost"] is not None else []),
            *([("energy at full power", f"{run['energy_kwh']:,.1f} kWh")] if run["energy_kwh"] is not None else []),
            ("checkpoint file", show_bytes(content["disk"]["checkpoint_bytes"])),
            ("run's folder", show_bytes(content["disk"]["run_bytes"])),
            ("figures from", content["calibration"]["source"])]
    for row in rows:
        table.add_row(*row)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for note in content["notes"]:
        console.print(f"- {note}", markup=False)


def print_fit_table(config: TrainConfig, device: Device) -> None:
    """The largest micro-batch that fits, for every preset."""
    from rich.console import Console
    from rich.table import Table

    from dit.terminal import progress_bar

    columns = list(alternatives.toggled(config))
    found: dict[str, list[str]] = {}
    with progress_bar("tracing") as progress:
        for model, _, micro_batch in alternatives.fit_table(config, device):
            found.setdefault(model, []).append(str(micro_batch) if micro_batch else "-")
            progress(sum(map(len, found.values())), len(PRESETS) * len(columns))
    table = Table(title=f"largest micro-batch that fits on one {device.name} ({show_bytes(device.memory_bytes)})")
    for name in ("model", *columns):
        table.add_column(name, justify="left" if name == "model" else "right")
    for model, cells in found.items():
        table.add_row(model, *cells)
    Console().print(table)
    if config.encodes_in_loop:
        print("The VAE encodes in the step, and that can be what limits it: --data latents shows the models alone, "
              "--encode-chunk 8 encodes fewer images at once.")


def _status():
    """Shown on a terminal while a step is traced: seconds the first time, nothing from the cache."""
    from rich.console import Console

    return Console(file=sys.stderr).status("tracing the step")


def show_bytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else show(num_bytes, "bytes")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.1f}"


def _range(values: Mapping[str, float | None], unit: str) -> str:
    if values["mid"] is None:
        return "unknown"
    low, mid, high = (show(values[key], unit) for key in ("low", "mid", "high"))
    return f"{mid} ({low} to {high})"


def _hours(values: Mapping[str, float | None]) -> str:
    if values["mid"] is None:
        return "unknown"
    low, mid, high = (duration(3600 * values[key]) for key in ("low", "mid", "high"))
    return f"{mid} ({low} to {high})"


if __name__ == "__main__":
    gc.disable()  # a short run, mostly imports: collecting meanwhile and at the end would take a quarter of it
    atexit.register(gc.freeze)
    run(main)
