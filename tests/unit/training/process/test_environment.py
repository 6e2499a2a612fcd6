"""What started this process."""

import os
import socket
from dataclasses import replace

import pytest
from problems import problem
from torch.distributed import TCPStore

from megatron.training.process.environment import (
    Launch,
    cpu_threads,
    export_determinism,
    export_launch,
    first_host,
    launch_notices,
    master_address,
    rank_environments,
    read_launch,
    tasks_per_node,
    verbosity,
)

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "CROSS_SIZE",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "PBS_JOBID",
    "PBS_NODEFILE",
    "PMIX_NAMESPACE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "DS_ACCELERATOR",
    "MEGATRON_DEEPSPEED_VERBOSITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
)


MANAGERS = ("SLURM_", "OMPI_", "PMI_", "MPI_LOCAL", "MV2_")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The variables of launchers, all gone; what a test or the code sets is undone."""
    for name in (*NAMES, *(name for name in os.environ if name.startswith(MANAGERS))):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def test_without_a_launcher_it_is_alone():
    assert read_launch(None) == Launch(rank=0, world_size=1, local_rank=0, local_size=1)


def test_the_variables_of_torch_run_are_read(environment):
    environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert read_launch(None) == Launch(5, 8, 1, 4)


def test_the_variables_of_the_deepspeed_launcher_are_read(environment):
    environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_SIZE="4")
    assert read_launch(1) == Launch(5, 8, 1, 4)


def test_the_local_rank_may_come_by_flag_alone(environment):
    environment(RANK="5", WORLD_SIZE="8")
    assert read_launch(3).local_rank == 3


def test_an_empty_variable_says_nothing(environment):
    environment(RANK="", WORLD_SIZE="")
    assert read_launch(None) == Launch(0, 1, 0, 1)


def slurm(task, tasks, local, node=0, **more):
    """What srun tells a task of a job whose nodes have two tasks each."""
    return {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "gpu[03-04]"},
        **{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)},
        **{"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_NTASKS": "64"},
        **{"SLURM_STEP_TASKS_PER_NODE": f"2(x{tasks // 2})" if tasks > 1 else "1"},
        **more,
    }


def open_mpi(rank, size):
    return {
        f"OMPI_COMM_WORLD_{name}": str(value)
        for name, value in {"RANK": rank, "SIZE": size, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items()
    }


def output(rank, size, **more):
    """What a launcher or a script says, in any case."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % 4), **more}


def torch_launcher(rank, size, *, nodes):
    elastic = {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": str(nodes)}
    return output(rank, size, LOCAL_WORLD_SIZE="4", **elastic)


def deepspeed_launcher(rank, size, *, nodes):
    return output(rank, size, LOCAL_SIZE="4", CROSS_SIZE=str(nodes))


HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        pytest.param(slurm(3, 4, 1, 1), Launch(3, 4, 1, 2), id="srun"),
        pytest.param(open_mpi(5, 8), Launch(5, 8, 1, 2), id="Open MPI"),
        pytest.param(HYDRA, Launch(5, 8, 1, 2), id="MPICH and Intel MPI"),
        pytest.param(
            {name.replace("OMPI", "MV2"): value for name, value in open_mpi(5, 8).items()},
            Launch(5, 8, 1, 2),
            id="MVAPICH2",
        ),
        pytest.param(
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"},
            Launch(1, 4, 1, 4),
            id="srun, few variables",
        ),
        pytest.param(
            {**slurm(1, 2, 1), "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            Launch(1, 2, 0, 2),
            id="srun, a script repeats it",
        ),
        pytest.param(
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
            Launch(0, 1, 0, 1),
            id="in a batch script, not through srun",
        ),
        pytest.param(
            {**open_mpi(1, 2), **slurm(0, 1, 0)}, Launch(1, 2, 1, 2), id="mpirun starts by srun"
        ),
        pytest.param(
            {**torch_launcher(5, 8, nodes=2), **slurm(0, 2, 0)},
            Launch(5, 8, 1, 4),
            id="srun of torch's launcher",
        ),
        pytest.param(
            {**deepspeed_launcher(5, 8, nodes=2), **slurm(0, 1, 0)},
            Launch(5, 8, 1, 4),
            id="srun of one deepspeed launcher, which starts the others",
        ),
        pytest.param(
            {**output(5, 8, LOCAL_WORLD_SIZE="4"), **slurm(1, 2, 0)},
            Launch(5, 8, 1, 4),
            id="a script starts four processes in each task",
        ),
        pytest.param(
            {**torch_launcher(1, 4, nodes=1), **slurm(0, 2, 0)},
            Launch(1, 4, 1, 4),
            id="torch's launcher began with fewer nodes",
        ),
    ],
)
def test_the_place_is_read_from_whatever_started_the_process(environment, variables, place):
    environment(**variables)
    assert read_launch(None) == place


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {**slurm(1, 4, 1), "WORLD_SIZE": "2"},
            "SLURM_STEP_NUM_TASKS=4 … WORLD_SIZE=2 … unset WORLD_SIZE … --ntasks 1",
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "WORLD_SIZE": "2", "RANK": "1"},
            "SLURM_NTASKS=4 … WORLD_SIZE=2",
        ),
        (
            {**open_mpi(1, 4), "RANK": "0", "WORLD_SIZE": "4"},
            "OMPI_COMM_WORLD_RANK=1 … RANK=0 … unset RANK",
        ),
        ({**HYDRA, "RANK": "5", "WORLD_SIZE": "4"}, "PMI_SIZE=8 … WORLD_SIZE=4"),
        (
            {**deepspeed_launcher(1, 4, nodes=1), **slurm(1, 4, 1)},
            "SLURM_STEP_NUM_TASKS=4 … CROSS_SIZE=1 … --num_nodes 4 … --ntasks 1",
        ),
        ({**slurm(1, 2, 1), **output(0, 1)}, "SLURM_STEP_NUM_TASKS=2 … WORLD_SIZE=1 … --ntasks 1"),
        ({**slurm(0, 1, 0), "WORLD_SIZE": "2"}, "WORLD_SIZE=2 … RANK … launcher"),
    ],
)
def test_sources_that_disagree_are_named_both(environment, variables, message):
    environment(**variables)
    with problem(message):
        read_launch(None)


@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        ({**torch_launcher(1, 4, nodes=1), **slurm(0, 2, 0)}, True),
        ({**torch_launcher(5, 8, nodes=2), **slurm(0, 2, 0)}, False),
        ({**torch_launcher(1, 4, nodes=1), **slurm(0, 1, 0)}, False),
        (torch_launcher(1, 4, nodes=1), False),
        (slurm(0, 2, 0), False),
    ],
)
def test_a_launcher_of_fewer_nodes_than_tasks_is_told(environment, variables, is_told):
    environment(**variables)
    notices = list(launch_notices())
    assert len(notices) == is_told
    assert all("SLURM_STEP_NUM_TASKS=2 but GROUP_WORLD_SIZE=1" in notice for notice in notices)


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        (slurm(0, 4, 0), "gpu03"),
        (slurm(0, 2, 0), "127.0.0.1"),
        (slurm(0, 4, 0, MASTER_ADDR="there"), "there"),
        (slurm(0, 4, 0, SLURM_STEP_NODELIST="", SLURM_JOB_NODELIST="login,gpu[1-2]"), "login"),
    ],
)
def test_processes_of_a_job_meet_at_its_first_node(environment, variables, address):
    environment(**variables)
    export_launch(read_launch(None), "cpu")
    assert os.environ["MASTER_ADDR"] == address
    assert 20000 <= int(os.environ["MASTER_PORT"]) < 30000


def test_spare_processes_find_the_address_and_the_port_of_the_ranks(environment):
    places = []
    for task, spares in ((0, 2), (3, 2), (0, 0)):
        environment(**slurm(task, 4, 0, MASTER_PORT="", MASTER_ADDR="", RANK="", WORLD_SIZE=""))
        launch = replace(read_launch(None), world_size=4 - spares, spares=spares)
        export_launch(launch, "cpu")
        places.append((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
        is_spare = task >= launch.world_size
        assert os.environ["WORLD_SIZE"] == ("" if is_spare else str(launch.world_size))
        assert master_address(launch).processes == 4
    assert places == [places[0]] * 3
    assert places[0][0] == "gpu03"


def test_processes_of_a_job_find_its_port_and_others_another(environment):
    ports = []
    for job, task in (("7", 0), ("7", 1), ("8", 0)):
        environment(**slurm(task, 2, task, SLURM_JOB_ID=job, MASTER_PORT="", MASTER_ADDR=""))
        export_launch(read_launch(None), "cpu")
        ports.append(os.environ["MASTER_PORT"])
        environment(RANK="", WORLD_SIZE="", LOCAL_RANK="")
    assert ports[0] == ports[1] != ports[2]


def test_processes_of_pbs_meet_at_the_first_node_of_its_file(environment, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("r1i0n3\nr1i0n3\nr1i0n4\n")
    environment(**HYDRA, PBS_NODEFILE=str(nodes), PBS_JOBID="7.head")
    export_launch(read_launch(None), "cpu")
    assert os.environ["MASTER_ADDR"] == "r1i0n3"
    environment(MASTER_ADDR="", PBS_NODEFILE=str(tmp_path / "none"))
    with problem("PBS_NODEFILE= … none: No such file"):
        export_launch(read_launch(None), "cpu")


def test_processes_on_several_nodes_need_an_address(environment):
    environment(**HYDRA)
    with problem("WORLD_SIZE=8 … nodes … MASTER_ADDR"):
        export_launch(read_launch(None), "cpu")


def test_processes_without_the_name_of_a_job_need_a_port(environment):
    """Otherwise all such jobs of a machine would take the same."""
    environment(**HYDRA, MASTER_ADDR="there")
    with problem("PMI_SIZE=8 … SLURM_JOB_ID … MASTER_PORT"):
        export_launch(read_launch(None), "cpu")
    environment(MASTER_PORT="6000")
    export_launch(read_launch(None), "cpu")
    assert os.environ["MASTER_PORT"] == "6000"


@pytest.mark.parametrize(
    ("port", "output"),
    [("abc", "MASTER_PORT='abc' … number"), ("70000", "MASTER_PORT=70000 … 65535")],
)
def test_a_port_that_cannot_be_is_refused_before_anybody_waits_there(environment, port, output):
    environment(MASTER_ADDR="localhost", MASTER_PORT=port)
    with problem(output):
        export_launch(Launch(0, 2, 0, 2), "cpu")


def test_deepspeed_takes_the_number_of_the_device_from_the_local_rank(environment):
    environment(**open_mpi(1, 2), PMIX_NAMESPACE="7")
    export_launch(read_launch(None), "cuda", device_index=0)
    assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "0"


def test_lists_of_nodes_are_read():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    hosts = {"a1": "a1", "b[07-09,12]": "b07", "r[1-2]n[3,5]x,c": "r1n3x", "": ""}
    assert {nodes: first_host(nodes) for nodes in hosts} == hosts


@pytest.mark.parametrize(
    ("variables", "local_rank", "message"),
    [
        ({"RANK": "8", "WORLD_SIZE": "8"}, None, "RANK=8 … WORLD_SIZE=8 … 0 to 7"),
        ({"RANK": "1"}, None, "RANK=1 … WORLD_SIZE=1 … both … launcher"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, None, "RANK=-1 … WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, None, "RANK=0 … WORLD_SIZE=0"),
        ({"RANK": "one"}, None, "RANK='one' … number"),
        ({"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}, 0, "LOCAL_RANK=1 … --local_rank 0"),
        ({"WORLD_SIZE": "2"}, None, "WORLD_SIZE=2 … RANK"),
    ],
)
def test_a_contradiction_is_told(environment, variables, local_rank, message):
    environment(**variables)
    with problem(message):
        read_launch(local_rank)


def test_libraries_are_told_what_a_launcher_did_not_say():
    export_launch(Launch(0, 1, 0, 1), "cpu")
    messages = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    assert messages == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert (os.environ["DS_ACCELERATOR"], os.environ["MASTER_ADDR"]) == ("cpu", "127.0.0.1")
    assert 1024 <= int(os.environ["MASTER_PORT"]) < 65536


def test_the_address_of_the_launcher_is_kept(environment):
    environment(MASTER_ADDR="node0", MASTER_PORT="6000")
    for world_size in (1, 4):
        export_launch(Launch(0, world_size, 0, 1), "cuda")
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node0", "6000")


def test_several_processes_need_a_port():
    with problem("WORLD_SIZE=2 … torch.distributed.run … MASTER_PORT"):
        export_launch(Launch(0, 2, 0, 2), "cpu")


def test_processes_of_a_node_share_its_cores(environment, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    assert [cpu_threads(Launch(0, n, 0, n)) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    environment(OMP_NUM_THREADS="3")
    assert cpu_threads(Launch(0, 2, 0, 2)) == 3


def test_how_much_is_said_can_come_from_the_environment(environment):
    assert verbosity() is None
    environment(MEGATRON_DEEPSPEED_VERBOSITY="Debug")
    assert verbosity() == "debug"
    environment(MEGATRON_DEEPSPEED_VERBOSITY="loud")
    with problem("='loud' … debug, info, warning"):
        verbosity()


def test_determinism_is_told_to_the_libraries_and_what_contradicts_it_refused(environment):
    export_determinism()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
    environment(CUBLAS_WORKSPACE_CONFIG=":16:8", NCCL_ALGO="CollnetChain,Ring")
    export_determinism()
    assert os.environ["NCCL_ALGO"] == "CollnetChain,Ring"
    environment(NCCL_ALGO="Ring,Tree")
    with problem("NCCL_ALGO=Ring,Tree … unset … CollnetDirect"):
        export_determinism()


def test_ranks_started_here_have_a_port_that_the_system_gives_to_nothing_else(environment):
    with rank_environments(2) as (first, second):
        assert (first["RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
        assert first["MASTER_PORT"] == second["MASTER_PORT"]
        place = (first["MASTER_ADDR"], port := int(first["MASTER_PORT"]))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
