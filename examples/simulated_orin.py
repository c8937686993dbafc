"""Tune EfficientNet-B4 on a simulated Jetson AGX Orin: no hardware needed, every figure is simulated.

Run it from anywhere: ``python examples/simulated_orin.py``.
"""

import polythrottle


def main() -> None:
    """Find the clocks and batch size of least energy whose p99 stays within 1.2 times that of the stock settings."""
    result = polythrottle.tune("sim:jetson-agx-orin", "efficientnet-b4", "p99<=1.2x", trials=15)
    study = result.study
    for trial in study.trials:
        if trial.measurement is not None:
            holds = "holds" if study.feasible(trial) else "breaks the SLO"
            energy_j, p99_s = trial.measurement.energy_j, trial.measurement.latency.p99_s
            print(f"trial {trial.number:2}: {energy_j:.3f} J per picture, p99 {p99_s:.4f} s, {holds}")
    for preset in study.references:
        print(f"preset {preset.name}: {preset.measurement.energy_j:.3f} J per picture")
    if study.saving_fraction is not None:
        print(f"saves {study.saving_fraction:.0%} of the stock energy (simulated)")
    print(result.unmet or f"profile: {result.profile_path}")
    print(f"report: {result.report_path}")


if __name__ == "__main__":
    main()
