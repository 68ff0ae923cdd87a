"""Train a DiT: plan the run, train it, hold one against the other. ``python train.py --help`` lists every setting."""

from dit.cli import run, train_config
from dit.config import TrainConfig, UsageError


def main(args: list[str]) -> int:
    config = train_config(args, prog="train.py")
    from dit.parallel import processes

    with processes() as ranks:
        config.micro_batch(ranks.world_size)
        return start(config, ranks)


def start(config: TrainConfig, ranks) -> int:
    """Open the run's folder, freeze the plan, train, and after a trial report. Returns the exit code."""
    from dit import preflight
    from dit.data import LoaderError
    from dit.guards import Diverged
    from dit.pulse import RankLost
    from dit.relief import OutOfRoom
    from dit.report import print_table, write_report
    from dit.run_folder import Log, open_run
    from dit.trial import device_facts, freeze_plan, run_trial

    folder = open_run(config, ranks)
    say = Log(folder) if ranks.is_main else None
    plan = None
    if config.trial.plan != "off":
        plan = ranks.on_main(lambda: freeze_plan(config, folder, ranks))
        heed(config, plan.content, say)
        checks = preflight.preflight(config, folder, ranks, plan.content)
        if say:
            preflight.show(checks, say, quiet=True)
        preflight.stop(checks, config)
    try:
        outcome, result = run_trial(config, folder, ranks, device_facts(config, ranks, plan), plan, say)
    except (Diverged, LoaderError, OutOfRoom, RankLost) as error:
        (say or print)(f"stopped: {error}")
        return error.exit_code
    if result is not None:
        report = write_report(folder.path, plan.content, result)
        print_table(result)
        say(f"report: {report}")
    if outcome.signal_number is not None:
        if say:
            say(f"stopped by signal {outcome.signal_number} after step {outcome.step} of {outcome.total_steps}, saved; "
                f"the same command with --run-dir {folder.path} goes on from there")
        return 128 + outcome.signal_number
    return 0


def heed(config: TrainConfig, plan: dict, say) -> None:
    """Say what the plan expects. Raises UsageError where --plan require finds that the run will not fit."""
    from dit.report import plan_sentence

    sentence = plan_sentence(plan)
    if plan["memory"]["verdict"] == "does_not_fit" and config.trial.plan == "require":
        raise UsageError(f"--plan require: {sentence}")
    if say:
        say(sentence)


if __name__ == "__main__":
    run(main)
