"""`caramba doctor` in a SLURM job: the shapes of a step that make no run, by the variables that srun sets."""

from __future__ import annotations

import pytest

from caramba.launch.commands.doctor import slurm_task

STEP = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "1"}
OURS = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "CARAMBA_RANKS": "slurm", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (OURS, None),
        ({**OURS, "CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ({**OURS, "CUDA_VISIBLE_DEVICES": ""}, None),
        ({**STEP, "SLURM_NTASKS": "8"}, None),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, None),
        (
            {name: value for name, value in OURS.items() if name != "SLURM_NTASKS_PER_NODE"},
            "--ntasks-per-node=unset does not make them; ask for --ntasks-per-node=2 in place of --ntasks",
        ),
        ({**OURS, "CUDA_VISIBLE_DEVICES": "0"}, "each sees the GPUs 0 alone; ask for --gpus-per-node"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, "task 1 of 2 on 1 nodes: each would run a command by itself"),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "each starts a torchrun; give torchrun one task per node",
        ),
    ],
)
def test_a_step_of_a_wrong_shape_is_named(variables: dict[str, str], text: str | None) -> None:
    """Traps: --ntasks without --ntasks-per-node, GPUs hidden by --gpus-per-task, several torchruns on a node."""
    (finding,) = slurm_task(variables)
    assert finding.is_ok is (text is None)
    assert (text or "job 7, task 1 of") in finding.text


def test_outside_slurm_nothing_is_said() -> None:
    assert list(slurm_task({})) == []
