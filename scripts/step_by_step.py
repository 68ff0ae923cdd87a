"""Write docs/step-by-step.md: a run that does not fit on a card, made to fit and then made better, step by step.

    python scripts/step_by_step.py

Every figure on the page is the planner's own; the page's first command prints the same ones.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from dit.cli import run
from dit.config import TrainConfig, UsageError, replace
from dit.planner import plan
from dit.planner.hardware import find_device
from dit.planner.what_if import variants
from dit.terminal import duration

OUTPUT = Path(__file__).parent.parent / "docs" / "step-by-step.md"
MODEL, DEVICE, BATCH, STEPS, LARGER = "DiT-L/4", "RTX-4090", 192, 400_000, 4
TEXTS = ("", "--amp", "--amp --ckpt",
         f"--amp --ckpt --global-batch-size {LARGER * BATCH} --max-steps {STEPS // LARGER}")
COMMAND = (f"python scripts/plan.py --model {MODEL} --data synthetic --device {DEVICE} --global-batch-size {BATCH} \\\n"
           f"    --max-steps {STEPS} --compare {' '.join(f'{chr(34)}{text}{chr(34)}' for text in TEXTS)}")


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def used(content: dict) -> float:
    """Bytes in use on the device."""
    return content["memory"]["device_used_bytes"]["mid"]


def rate(content: dict) -> float:
    return content["time"]["images_per_second"]


def table(plans: Sequence[dict]) -> list[str]:
    """One column per step."""
    rows = {
        "flags": [f"`{text}`" if text else "none" for text in TEXTS],
        "fits": [content["memory"]["verdict"].replace("_", " ") for content in plans],
        "memory in use": [gib(used(content)) for content in plans],
        "of it activations at the peak": [gib(content["memory"]["by_category"]["activations"]) for content in plans],
        "peak in phase": [content["memory"]["peak_phase"] for content in plans],
        "micro-batch": [str(content["config"]["memory"]["global_batch_size"]) for content in plans],
        "step": [f"{1e3 * content['time']['step_seconds']['mid']:.0f} ms" for content in plans],
        "images per second": [f"{rate(content):.0f}" for content in plans],
        "whole run": [duration(3600 * content["run"]["hours"]["mid"]) for content in plans],
    }
    return ["| | baseline | 1. AMP | 2. checkpointing | 3. larger micro-batch |", "|---|---:|---:|---:|---:|",
            *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()), ""]


def page(plans: Sequence[dict]) -> list[str]:
    """The page, line by line."""
    source = plans[0]["calibration"]["source"]
    lines = [f"# {MODEL} on a card of 24 GB, step by step", "",
             *paragraph("Made by `python scripts/step_by_step.py`. The figures are the planner's and nothing has been "
                        f"measured; times rest on {source}. One command prints them side by side:"),
             "```bash", COMMAND, "```", "", *table(plans)]
    sections = (("Baseline: it does not fit", baseline(*plans)), ("Step 1: `--amp`", mixed_precision(*plans)),
                ("Step 2: `--ckpt`", checkpointing(*plans)),
                (f"Step 3: a micro-batch of {LARGER * BATCH}", larger_batch(*plans)), ("What to take", verdict(plans)))
    for title, text in sections:
        lines += [f"## {title}", "", *paragraph(text)]
    return lines


def paragraph(text: str) -> list[str]:
    return [*textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False), ""]


def activations(content: dict) -> int:
    return content["memory"]["by_category"]["activations"]


def baseline(base: dict, *_: dict) -> str:
    parts = base["memory"]["by_category"]
    state = sum(parts[name] for name in ("parameters", "gradients", "optimizer", "ema"))
    return (f"The card has {gib(base['device']['memory_bytes'])}, and {BATCH} images need {gib(used(base))}. Weights, "
            f"gradients, moments and average are {gib(state)} of that whatever the batch; what the forward keeps for "
            f"the backward is {gib(activations(base))}. So it is activations that must shrink.")


def mixed_precision(base: dict, amp: dict, *_: dict) -> str:
    copies = amp["memory"]["by_category"]["cast_copies"]
    fits = "It fits." if amp["memory"]["verdict"] == "fits" else "It is tight: the high figure does not fit."
    return (f"Matrix products run in bf16, so what they keep for the backward shrinks: activations are "
            f"{1 - activations(amp) / activations(base):.0%} less, copies of the weights in bf16 take {gib(copies)}. "
            f"Weights, gradients and moments stay fp32. {fits} A step makes {rate(amp) / rate(base):.2f} times as many "
            "images per second; the cost is rounding inside forward and backward, and no setting to tune.")


def checkpointing(base: dict, amp: dict, ckpt: dict, _: dict) -> str:
    return (f"Each block keeps its input only, and its forward runs again in the backward: activations are "
            f"{1 - activations(ckpt) / activations(amp):.0%} less, and {gib(used(ckpt))} are in use. The price is that "
            f"second forward, {1 - rate(ckpt) / rate(amp):.0%} of the images per second, so where the step before fits "
            "this one pays only for what comes next; `--ckpt-blocks N` pays for less.")


def larger_batch(base: dict, amp: dict, ckpt: dict, larger: dict) -> str:
    ratio = rate(larger) / rate(ckpt)
    why = ("the device was nearly full already, so memory was not what held it back." if ratio < 1.1 else
           "the device had not been full.")
    return (f"The room is spent on {LARGER} times as many images per step, in {STEPS // LARGER:,} steps instead of "
            f"{STEPS:,}: as many images in all. It uses {gib(used(larger))} and makes {ratio - 1:+.1%} images per "
            f"second: {why} A larger global batch is another training, whose learning rate wants a look; "
            "`--grad-accum` reaches it without the memory.")


def verdict(plans: Sequence[dict]) -> str:
    """The fastest column that fits."""
    names = ("the baseline", "step 1", "step 2", "step 3")
    fitting = [(rate(content), name) for name, content in zip(names, plans, strict=True)
               if content["memory"]["verdict"] == "fits"]
    best, name = max(fitting)
    return (f"Of what fits, {name} is the fastest: {best:.0f} images per second. `python scripts/plan.py --recommend` "
            "searches these and all others, and gives the line to paste.")


def main(args: list[str]) -> int:
    if args:
        raise UsageError(f"step_by_step.py takes no arguments, found {args[0]}")
    base = replace(TrainConfig(), model=MODEL, data="synthetic", global_batch_size=BATCH, max_steps=STEPS)
    device = find_device(DEVICE)
    plans = [plan(config, device).to_dict() for config in variants(TEXTS, base).values()]
    OUTPUT.write_text("\n".join(page(plans)))
    print(OUTPUT)
    return 0


if __name__ == "__main__":
    run(main)
