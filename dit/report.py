"""What a trial found, for people: one table in the terminal, report.md, and report.html with the curves.

matplotlib and rich are imported where they are used.
"""

import base64
import html
import io
from collections.abc import Iterable
from pathlib import Path

from dit.metrics import read_metrics
from dit.terminal import duration, show

TITLES = {
    "peak_allocated_bytes": "peak memory, allocated", "peak_reserved_bytes": "peak memory, reserved",
    "device_used_bytes": "memory in use on the device", "step_seconds": "time per step",
    "images_per_second": "images per second", "checkpoint_bytes": "checkpoint file", "mfu": "MFU",
}
_COLUMNS = ("quantity", "predicted", "low", "high", "measured", "ratio", "within")


def table_rows(rows: Iterable[dict]) -> list[tuple[str, ...]]:
    """The comparison's rows as text, in the order of the columns."""
    texts = []
    for row in rows:
        figures = (show(row[key], row["unit"]) if key == "measured" or row[key] is not None else "-"
                   for key in ("predicted", "low", "high", "measured"))
        ratio = f"{row['ratio']:.3f}" if row["ratio"] is not None else "-"
        within = {True: "yes", False: "NO", None: "-"}[row["within"]]
        texts.append((TITLES.get(row["quantity"], row["quantity"]), *figures, ratio, within))
    return texts


def print_table(result: dict) -> None:
    """Predicted beside measured, and the verdict, in the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"trial of {result['steps']} steps, {result['warmup_steps']} of warm-up left out of the timing")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "quantity" else "right", no_wrap=True)
    for texts in table_rows(result["rows"]):
        table.add_row(*texts, style="red" if texts[-1] == "NO" else None)
    console = Console(width=max(100, Console().width))  # a log file has no width of its own
    console.print(table)
    console.print(f"verdict: {result['verdict'].upper()}  {verdict_sentence(result)}", soft_wrap=True)


def verdict_sentence(result: dict) -> str:
    """What the verdict means and what to do next, in one or two sentences."""
    wrong = [TITLES.get(row["quantity"], row["quantity"]) for row in result["rows"] if row["within"] is False]
    run = result["full_run"]
    hours = run["hours"]["mid"]
    whole = f"At this speed the whole run, {run['steps']:,} steps, takes {duration(3600 * hours)}. " if hours else ""
    if result["verdict"] == "pass":
        return f"{whole}The plan held: the run can go on; give the same command without --trial."
    if wrong:
        return (f"{whole}Outside its interval: {', '.join(wrong)}. Trust the measured figures, and run "
                "scripts/calibrate.py on this machine before planning the next run.")
    return f"{whole}Nothing was measured that could be judged; run a longer trial."


def plan_sentence(plan: dict) -> str:
    """A plan in one line: does it fit, how long does it take."""
    memory, time, run = plan["memory"], plan["time"], plan["run"]
    fits = {"fits": "fits", "tight": "is a tight fit", "does_not_fit": "does NOT fit"}[memory["verdict"]]
    used, total = memory["device_used_bytes"], plan["device"]["memory_bytes"]
    step, hours = time["step_seconds"], run["hours"]
    room = (f"plan: {fits} on {plan['device']['name']} ({show(used['mid'], 'bytes')} of {show(total, 'bytes')}, peak "
            f"in {memory['peak_phase']})")
    if step["mid"] is None:
        return f"{room}; time not planned: this device has not been measured, see scripts/calibrate.py"
    return (f"{room}; {show(step['mid'], 's')} per step ({show(step['low'], 's')} to {show(step['high'], 's')}), bound "
            f"by {time['bound_by']}; {run['steps']:,} steps in {duration(3600 * hours['mid'])}; time from "
            f"{plan['calibration']['kind']} constants")


def write_report(folder: Path, plan: dict, result: dict) -> Path:
    """Write report.md and report.html into the run's folder from the plan, trial.json's content and the metrics.

    Returns the path of report.html.
    """
    records = read_metrics(folder / "metrics.jsonl")[:result["steps"]]
    (folder / "report.md").write_text(_markdown(plan, result))
    path = folder / "report.html"
    memory = folder / "memory.png"
    planned_memory = memory.read_bytes() if memory.exists() else None
    path.write_text(_html(plan, result, _figure(plan, result, records), planned_memory))
    return path


def _markdown(plan: dict, result: dict) -> str:
    lines = [f"# Trial of {_name(plan)}: {result['verdict'].upper()}", "", verdict_sentence(result), "",
             "| " + " | ".join(_COLUMNS) + " |", "|---|" + "---:|" * (len(_COLUMNS) - 1)]
    lines += ["| " + " | ".join(texts) + " |" for texts in table_rows(result["rows"])]
    lines += ["", "## Memory by phase", "", "| phase | predicted | measured |", "|---|---:|---:|"]
    lines += [f"| {phase} | {predicted} | {measured} |" for phase, predicted, measured in _phase_rows(result)]
    lines += ["", "## What this trial shows, and what not", "", *(f"- {text}" for text in _scope(plan, result)), ""]
    return "\n".join(lines)


def _phase_rows(result: dict) -> list[tuple[str, str, str]]:
    phases = result["memory_by_phase"]
    return [(phase, show(predicted, "bytes"), show(phases["measured"].get(phase), "bytes"))
            for phase, predicted in phases["predicted"].items()]


def _name(plan: dict) -> str:
    return f"{plan['config']['model']['model']} on {plan['num_devices']} x {plan['device']['name']}"


def _scope(plan: dict, result: dict) -> list[str]:
    calibration, hours, cost = plan["calibration"], result["full_run"]["hours"], result["full_run"]["cost"]
    ends = [hours[end] for end in ("low", "high")]
    whole = "not measured" if None in ends else " to ".join(duration(3600 * end) for end in ends)
    return [
        f"The plan (SHA-256 {result['plan_sha256'][:16]}) was frozen before the first step; its time rests on "
        f"{calibration['kind']} constants: {calibration['source']}.",
        f"The whole run of {result['full_run']['steps']:,} steps at this speed: {whole}"
        + (f", {cost:,.0f} in money." if cost is not None else "."),
        f"{result['steps']} steps show memory and speed, not the quality the run will reach: the loss starts near 1 "
        "(the model's first output is zero) and falls most in the first few hundred steps, whatever follows.",
        "Figures that the device does not report are given as not measured and judge nothing.",
        *plan["notes"],
    ]


def _figure(plan: dict, result: dict, records: list[dict]) -> bytes:
    """Loss, step time with the planned interval, and memory by phase, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss, time, memory) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    steps = [record["step"] for record in records]
    loss.plot(steps, [record["loss"] for record in records], linewidth=0.8, color="#33658a")
    loss.set(title="loss", xlabel="step", yscale="log")
    timed = [(record["step"], 1e3 * record["step_seconds"]) for record in records if record["step_seconds"]]
    time.plot([step for step, _ in timed], [value for _, value in timed], ".", markersize=2, color="#33658a",
              label="measured")
    highest = [sorted(value for _, value in timed)[len(timed) // 2]] if timed else [1.0]
    if plan["time"]["step_seconds"]["mid"] is not None:
        planned = {end: 1e3 * value for end, value in plan["time"]["step_seconds"].items()}
        time.axhspan(planned["low"], planned["high"], alpha=0.25, color="#f6ae2d", label="planned, low to high")
        time.axhline(planned["mid"], color="#f26419", label="planned")
        highest.append(planned["high"])
    time.set(title="time per step (ms)", xlabel="step", ylim=(0, 2 * max(highest)))
    time.legend(loc="lower right")
    phases = result["memory_by_phase"]
    names = list(phases["predicted"])
    for offset, (label, color) in enumerate((("predicted", "#f6ae2d"), ("measured", "#33658a"))):
        memory.bar([index + 0.4 * offset for index in range(len(names))],
                   [(phases[label].get(name) or 0) / 2**20 for name in names], width=0.4, label=label, color=color)
    memory.set_xticks([index + 0.2 for index in range(len(names))], names, rotation=30)
    memory.set(title="peak memory by phase (MiB)")
    memory.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    pyplot.close(figure)
    return picture.getvalue()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }} td, th {{ padding: .3rem .8rem; border-bottom: 1px solid #ccc }}
td {{ text-align: right; font-variant-numeric: tabular-nums }} td:first-child, th {{ text-align: left }}
.pass {{ color: #176b2c }} .fail {{ color: #b00020 }} img {{ max-width: 100% }}
</style></head><body>
<h1>{title}: <span class="{verdict}">{verdict_upper}</span></h1>
<p>{sentence}</p>
{table}
{picture}
<h2>Memory by phase</h2>
{phases}
{memory}
<h2>What this trial shows, and what not</h2>
<ul>{scope}</ul>
</body></html>
"""


def _html(plan: dict, result: dict, picture: bytes, memory: bytes | None) -> str:
    title = html.escape(f"Trial of {_name(plan)}")
    return _PAGE.format(
        title=title, verdict=result["verdict"], verdict_upper=result["verdict"].upper(),
        sentence=html.escape(verdict_sentence(result)), table=_html_table(_COLUMNS, table_rows(result["rows"])),
        picture=_image("Loss, time per step and memory by phase", picture),
        memory=_image("Planned memory over one step, by category", memory),
        phases=_html_table(("phase", "predicted", "measured"), _phase_rows(result)),
        scope="".join(f"<li>{html.escape(text)}</li>" for text in _scope(plan, result)))


def _image(words: str, png: bytes | None) -> str:
    return f'<img alt="{words}" src="data:image/png;base64,{base64.b64encode(png).decode()}">' if png else ""


def _html_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"
