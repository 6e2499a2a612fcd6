"""Energy and CO2, measured by the real codecarbon, without a network or a power meter."""

import csv
import re
import time

import pytest
from problems import problem

from megatron.checkpointing.train_state import TrainState
from megatron.config.run.logging import EnergyPlan
from megatron.training.telemetry.energy import Energy


def rows_of(folder):
    with (folder / "emissions-000.csv").open() as stream:
        return list(csv.DictReader(stream))


def run(folder, iterations, *, country="FRA"):
    energy = Energy(
        EnergyPlan(directory=str(folder), country=country), rank=0, measures=True, interval=2
    )
    messages = []
    for iteration in iterations:
        time.sleep(0.05)
        messages.append(energy(TrainState(iteration=iteration, samples=4 * iteration)))
    energy.close(TrainState(iteration=iterations[-1], samples=4 * iterations[-1]))
    return messages


def test_the_record_goes_on_over_restarts(group, tmp_path, messages):
    folder = tmp_path / "new"
    first = run(folder, [1, 2, 3, 4])
    assert [bool(messages) for messages in first] == [False, True, False, True]
    before = rows_of(folder)
    assert [row["iteration"] for row in before] == ["2", "4", "4"]
    assert [row["consumed_samples"] for row in before] == ["8", "16", "16"]
    assert 0 < first[1]["energy (kWh)"] < first[3]["energy (kWh)"]
    assert first[3]["CO2 (kg)"] == pytest.approx(float(before[1]["total_emissions_kg"]), abs=1e-9)

    (second,) = run(folder, [6])
    after = rows_of(folder)
    assert after[:3] == before
    last = after[3]
    total = float(before[-1]["total_energy_kwh"]) + float(last["energy_kwh"])
    assert float(last["total_energy_kwh"]) == pytest.approx(total, abs=1e-9)
    assert second["energy (kWh)"] == pytest.approx(total, abs=2e-9)
    numbers = re.findall(r"([0-9.]+) k[Wg]", messages[-1])
    rows = [
        float(last[f"{of}{what}"])
        for of in ("", "total_")
        for what in ("energy_kwh", "emissions_kg")
    ]
    assert [*map(float, numbers)] == pytest.approx(rows, abs=1e-6)
    assert messages[-1].endswith(f"by node: {folder}/emissions-*.csv")
    assert len(messages) == 2


def test_other_ranks_of_a_node_only_add_up(group, tmp_path):
    plan = EnergyPlan(directory=str(tmp_path / "none"), country="FRA")
    energy = Energy(plan, rank=3, measures=False, interval=1)
    assert energy(TrainState(iteration=1)) == {"energy (kWh)": 0.0, "CO2 (kg)": 0.0}
    energy.close(TrainState(iteration=1))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "content", ["something else\n1\n", "total_energy_kwh,total_emissions_kg\nx,y\n"]
)
def test_a_file_of_somebody_else_is_not_added_to(tmp_path, content):
    (tmp_path / "emissions-000.csv").write_text(content)
    with problem("emissions-000.csv … energy … move it"):
        run(tmp_path, [2])


def test_a_directory_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").touch()
    with problem("--codecarbon-dir"):
        run(tmp_path / "file", [2])
