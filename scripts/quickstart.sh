#!/usr/bin/env bash
# From nothing to a planned, trained, measured and sampled run on the embedded digits: a few minutes on two CPU cores.
# Arguments go to train.py. RUN_DIR names the run's folder (default results/quickstart); an interrupted run goes on.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$project"
run_dir=${RUN_DIR:-results/quickstart}
started=$SECONDS
config=configs/digits.toml

step() { printf '\n== %s\n' "$1"; }

step "1/5  calibrate: what this device really does (once)"
python scripts/calibrate.py --quick

step "2/5  plan: what the run will take"
python scripts/plan.py --config $config "$@"

step "3/5  trial: 500 steps, predicted beside measured"
python train.py --config $config --run-dir "$run_dir" --trial "$@"

step "4/5  train on: the same run, from where the trial ended"
python train.py --config $config --run-dir "$run_dir" "$@"

step "5/5  sample and evaluate"
newest=$(ls "$run_dir"/checkpoints/*.pt | sort | tail -n 1)
python scripts/evaluate.py --ckpt "$newest" --grid "$run_dir/samples/grid.png"

took=$((SECONDS - started))
cat <<END

took:     $((took / 60)) min $((took % 60)) s after the installation
report:   $project/$run_dir/report.html
picture:  $project/$run_dir/samples/grid.png
next:     python sample.py --ckpt $newest --classes 3 7 --num-per-class 8 --cfg-scale 2
          python scripts/plan.py --model DiT-XL/2 --data synthetic --amp --ckpt --device A100-SXM4-80GB --num-devices 8
          python train.py --help
END
