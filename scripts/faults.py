"""Inject every fault of the test suite and write the table docs/faults.md: python scripts/faults.py

Minutes on two cores. A row is written only after its test has asserted what the row claims.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("test_resume", "test_faults", "test_checkpoint", "test_split", "test_torchrun")
HEAD = """# Faults, injected

Made by `python scripts/faults.py` from {tests}.
Each row was asserted by its test before it was written; the runs are tiny ones on a CPU. *Time to go on* is what the
same command took from its start to its first step, without importing torch (for a node: until the run was complete);
where there is none, the run went on by itself or was meant to end.

| fault | injected | times | what happened | lost | time to go on |
|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "faults.md", help="where the table goes")
    parser.add_argument("tests", nargs="*", default=TESTS, help="names of test modules (default: all that inject)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "rows.jsonl"
        report.touch()
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *[f"tests/{name}.py" for name in args.tests]],
                              cwd=ROOT, env={**os.environ, "FAULT_REPORT": str(report)})
        rows = [json.loads(line) for line in report.read_text().splitlines()]
    if done.returncode:
        print("faults.py: a test failed; the table was not written", file=sys.stderr)
        return done.returncode
    tests = ", ".join(f"`{name}`" for name in args.tests)
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(HEAD.format(tests=tests) + "".join(f"{line}\n" for line in table(rows)))
    print(f"{args.output}: {sum(row['times'] for row in rows)} faults in {len(rows)} tests")
    return 0


def table(rows: list[dict]) -> list[str]:
    """Rows of one kind together: times summed, the longest time to go on."""
    kinds: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["fault"], row["injected"])):
        kinds.setdefault((row["fault"], row["injected"], row["after"], row["lost"]), []).append(row)
    lines = []
    for (fault, injected, after, lost), alike in kinds.items():
        seconds = [row["seconds"] for row in alike if row["seconds"] is not None]
        times, taken = sum(row["times"] for row in alike), f"{max(seconds):.1f} s" if seconds else ""
        lines.append(f"| {fault} | {injected} | {times} | {after} | {lost} | {taken} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
