#!/usr/bin/env python3
"""The ratio rule against the simulation, in every configuration of figures 4 to 7 of the ratio paper.

    tests/bench/bench_ratio.py [--tandem build/bin/tandem] [--seeds 5] [--plots DIR]

Prints a Markdown table: r* of the mean field (N = 10,000), the best r by the form with lanes, the
best r of the simulation by the steady window and by the paper's 80% metric (means over the seeds),
the form's largest error at r = 1 to 32, and what the 80% metric is below the steady window."""

import argparse
import json
import pathlib
import subprocess

CONFIGURATIONS = [(256, 100, 500), (128, 100, 500), (512, 100, 500), (256, 100, 100), (256, 500, 500)]
MAX_R = 32


def run(tandem, command, *options):
    done = subprocess.run([tandem, command, "--preset", "ascend910c", "--json", *map(str, options)],
                          check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def study(args, batch, prefill, decode):
    load = ["--batch", batch, "--prefill", prefill, "--decode", decode]
    plan = run(args.tandem, "plan", *load, "--horizon", 10000)
    plot = []
    if args.plots:
        plot = ["--plot", args.plots / f"batch{batch}-{prefill}-{decode}.svg"]
    ratios = ",".join(str(r) for r in range(1, MAX_R + 1))
    points = run(args.tandem, "simulate", *load, "--requests", 10000, "--seed", 1, "--seeds",
                 args.seeds, "--ratio", ratios, *plot)["ratios"]
    predicted = {p["r"]: p["lanes"] for p in plan["curve"]}
    steady = {p["r"]: p["steady_throughput_per_instance"] for p in points}
    stable = {p["r"]: p["throughput_per_instance"] for p in points}
    worst = max((predicted[r] / steady[r] - 1 for r in steady), key=abs)
    below = [1 - stable[r] / steady[r] for r in steady]
    return [batch, f"{prefill}/{decode}", f"{plan['r_star']:.2f}", plan["lanes"]["r"],
            max(steady, key=steady.get), max(stable, key=stable.get), f"{100 * worst:+.2f}%",
            f"{100 * min(below):.1f} to {100 * max(below):.1f}%"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tandem", default="build/bin/tandem")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plots", type=pathlib.Path, help="folder for an SVG of each configuration")
    args = parser.parse_args()
    if args.plots:
        args.plots.mkdir(parents=True, exist_ok=True)
    print("| B | prompt/output | r*, mean field | best r, lanes | best r, steady | best r, 80% | "
          "largest error of lanes | 80% below steady |\n|---|---|---|---|---|---|---|---|")
    for configuration in CONFIGURATIONS:
        print("|", " | ".join(str(cell) for cell in study(args, *configuration)), "|", flush=True)


if __name__ == "__main__":
    main()
