"""Runs workloads on an engine started for them: throughput, time to first token and per output token, step parts.

    python -m benchmarks.throughput --workloads b1_128_512 w1_nano256
    python launch.py bench --workloads b1_128_512                  # the same, but it keeps no results unless told where
    python -m benchmarks.throughput --model DIR --load-format dummy --engine trireme --repeats 3

Each workload runs once to warm up and then `--repeats` times. The figures are those of the run with the median wall
time, with the wall times of all runs beside them. Prints a table, appends JSON lines to `--output`, and ends with one
JSON line.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import limits, records, workloads
from benchmarks.arguments import count, named_value
from benchmarks.engines import ENGINES, Engine, RequestTiming
from common.cli import VerbParser
from common.config import DEFAULT_MODEL, parse_count
from common.errors import ConfigError
from common.model_cache import ready_model_dir
from worker_proc.fetch_model import fetch_model
from worker_proc.model_config import read_model_config

SMOKE_WORKLOADS = ("b1_16_8", "b4_16_8")
CPU_WORKLOADS = ("b1_128_64", "b16_128_64")


def percentile(values: list[float], share: float) -> float:
    """The least value that `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarise(timings: list[RequestTiming], input_count: int) -> dict[str, float]:
    """The metrics of one run; `tpot_ms` is a request's mean time per output token after the first."""
    wall_s = max(t.last_token_s for t in timings) - min(t.submitted_s for t in timings)
    output_count = sum(t.output_count for t in timings)
    ttfts = [t.ttft_ms for t in timings]
    tpots = [t.tpot_ms for t in timings if t.tpot_ms is not None]
    metrics = {
        "wall_s": wall_s,
        "output_tokens_per_s": output_count / wall_s,
        "input_tokens_per_s": input_count / wall_s,
        "ttft_ms": statistics.fmean(ttfts),
        "ttft_ms_p50": percentile(ttfts, 0.5),
        "ttft_ms_p99": percentile(ttfts, 0.99),
    }
    if tpots:
        metrics |= {
            "ms_per_token": statistics.fmean(tpots),
            "tpot_ms_p50": percentile(tpots, 0.5),
            "tpot_ms_p99": percentile(tpots, 0.99),
        }
    return metrics


def measure(engine: Engine, name: str, repeats: int) -> dict[str, Any]:
    """Warm up, run `repeats` times, and give the metrics of the median run."""
    workload = workloads.load(name)
    input_count = sum(map(len, workload[0]))
    engine.run(workload)
    engine.step_parts_us()
    runs = [summarise(engine.run(workload), input_count) for _ in range(repeats)]
    parts_us = engine.step_parts_us()
    median = sorted(runs, key=lambda run: run["wall_s"])[len(runs) // 2]
    metrics: dict[str, Any] = {key: round(value, 4) for key, value in median.items()}
    metrics["runs"] = [round(run["wall_s"], 4) for run in runs]
    if parts_us:
        metrics["step_parts_us"] = {part: round(value, 1) for part, value in parts_us.items()}
    return metrics


def run(engine_name: str, names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All workloads on one engine, as records; prints a table row for each."""
    check_lengths(names, *known_limit(args))
    engine = _start(engine_name, args)
    entries = []
    try:
        check_lengths(names, engine.max_len, "the engine takes")
        for name in names:
            print(f"{name}: a run to warm up, then {args.repeats} timed", file=sys.stderr)
            metrics = measure(engine, name, args.repeats)
            print(table_row(engine_name, name, metrics), flush=True)
            entries.append(
                records.record(
                    benchmark="throughput",
                    engine=engine_name,
                    workload=name,
                    model=args.model_label or records.model_label(args.model),
                    weights="random" if args.load_format == "dummy" else "real",
                    metrics=metrics,
                    options=engine.options,
                )
            )
    finally:
        engine.close()
    if args.limits:
        ceilings = limits.measured_ceilings()
        for entry in entries:
            entry["limit"] = limits.limit_of(entry, Path(args.model), ceilings)
    return entries


def check_lengths(names: Sequence[str], limit: int, whose: str) -> None:
    """Refuse workloads with requests above a limit, if that is known and not 0; raises SystemExit."""
    for name in names:
        if limit and (longest := workloads.longest(name)) > limit:
            raise SystemExit(f"--workloads {name} has requests of {longest} tokens, prompt and output; {whose} {limit}")


def known_limit(args: argparse.Namespace) -> tuple[int, str]:
    """The most tokens of a request as far as it is known before a start, and whose limit that is; 0 for unknown."""
    given, of_model = str(engine_options(args).get("max_model_len", "")), 0
    with suppress(ConfigError):  # of a model that cannot be served: the start says more
        if folder := ready_model_dir(args.model):
            of_model = read_model_config(folder).context_limit
    with suppress(ConfigError):
        if (asked := parse_count(given)) and not 0 < of_model < asked:
            return asked, "--max-model-len is"
    return of_model, "the model takes"


def _start(engine_name: str, args: argparse.Namespace) -> Engine:
    model = args.model
    if model == DEFAULT_MODEL and engine_name != "trireme":
        model = str(fetch_model(model))  # other engines do not know it by this name
    try:
        return ENGINES[engine_name](model, engine_options(args))
    except ModuleNotFoundError as error:
        raise SystemExit(f"--engine {engine_name} needs the package {error.name}, which is not installed") from None


def table_row(engine_name: str, name: str, metrics: dict[str, Any]) -> str:
    """One line of the printed table."""
    return (
        f"{engine_name:<13}{name:<14}{metrics['output_tokens_per_s']:>11.1f} out tok/s"
        f"{metrics['input_tokens_per_s']:>11.1f} in tok/s  ttft {metrics['ttft_ms']:>9.2f} ms"
        f"  token {metrics.get('ms_per_token', float('nan')):>8.3f} ms  wall {metrics['wall_s']:>8.3f} s"
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, under the names that the engines' classes take."""
    options = {"dtype": args.dtype, "load_format": args.load_format, "max_model_len": args.max_model_len}
    return {key: value for key, value in options.items() if value} | dict(args.option)


def workload_name(text: str) -> str:
    """A workload's name from the command line, if there is one of this name."""
    try:
        workloads.longest(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parser(
    description: str, program: str | None = None, kind: type[argparse.ArgumentParser] = argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """The command line that `throughput` and `compare` share."""
    parsed = kind(prog=program, usage="%(prog)s [options]", description=description)
    add = parsed.add_argument
    add("--model", default="default", help="model folder, .gguf file or hub id (default: the embedded model)")
    add("--model-label", metavar="NAME", default="", help="the model's name in the results")
    what = "such as b16_128_64: a batch of 16, 128 tokens in and 64 out each (default: what suits the device)"
    add("--workloads", metavar="NAME", nargs="+", type=workload_name, default=[], help=what)
    add("--load-format", default="", choices=("auto", "dummy"), help="dummy draws random weights")
    add("--dtype", default="", help="as in serve")
    add("--max-model-len", metavar="N", type=int, default=0, help="as in serve")
    add("--option", action="append", type=named_value, default=[], metavar="NAME=VALUE",
        help="further options, such as run_ahead=0")  # fmt: skip
    add("--repeats", metavar="N", type=count, default=3, help="timed runs of each workload (default: 3)")
    add("--limits", action="store_true", help="on a GPU: keep what it could reach at best, too")
    add("--smoke", action="store_true", help="tiny sizes, one run, nothing kept: does it work")
    add("--output", metavar="FILE", default=str(records.RESULTS_DIR / "throughput.jsonl"),
        help="JSON lines to append the results to; '' keeps none, as the verb bench by default")  # fmt: skip
    return parsed


def chosen_workloads(args: argparse.Namespace) -> list[str]:
    """The workloads named, or the ones that suit the device."""
    if args.smoke:
        args.repeats, args.output = 1, ""
        return list(SMOKE_WORKLOADS)
    if args.workloads:
        return list(args.workloads)
    import torch

    return list(workloads.WORKLOADS if torch.cuda.is_available() else CPU_WORKLOADS)


def main(arguments: Sequence[str] | None = None, verb: str = "") -> None:
    """Parse, measure, print, save. As a verb (`launch.py bench`) it leaves wrong arguments to the entry to report."""
    program, kind = (verb, VerbParser) if verb else ("python -m benchmarks.throughput", argparse.ArgumentParser)
    parsed = parser(__doc__.split("\n\n")[0], program, kind)
    parsed.add_argument("--engine", default="trireme", choices=sorted(ENGINES), help="whose (default: trireme)")
    args = parsed.parse_args(arguments)
    names = chosen_workloads(args)
    records.check_output(args.output)
    started_s = time.time()
    entries = run(args.engine, names, args)
    if args.output:
        records.save(entries, args.output)
    print(json.dumps({"seconds": round(time.time() - started_s, 1), "results": entries}))


if __name__ == "__main__":
    main()
