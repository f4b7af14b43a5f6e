"""The launch files for machines elsewhere: what they send there, and that it fits together."""

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from spec_jax import distributed
from spec_jax.sharding import Layout
from tests.checkouts import Checkout

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["generate", "it's 1 < 2;\n$HOME `*` é", "--seed", "1"]


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def directives() -> dict[str, str]:
    """The options of the Slurm script."""
    lines = (ROOT / "launch" / "slurm_gpu.sbatch").read_text().splitlines()
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    return dict(option.split("=") for option in options)


def test_slurm_starts_one_process_for_each_gpu_of_the_layout():
    options = {name: int(value) for name, value in directives().items() if value.isdecimal()}
    layout = Layout.read(ROOT / "sharding" / "gpu-2x8.toml")
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["nodes"] * options["ntasks-per-node"] == layout.processes == layout.size
    assert dict(layout.mesh) == {"data": options["nodes"], "model": options["gpus-per-node"]}


def test_slurm_hands_the_words_on(checkout):
    checkout.command("srun", checkout.stand_in + "os.execvp('env', sys.argv[4:])\n")
    # As sbatch does: it runs a copy that lies elsewhere.
    spool = shutil.copy(checkout.root / "launch" / "slurm_gpu.sbatch", checkout.commands)
    env = {"SLURM_SUBMIT_DIR": str(checkout.root), "SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "4"}
    result = checkout.shell("bash", spool, *WORDS, env=env)
    assert result.returncode == 0, result.stderr
    (_, step, _), (name, words, variables) = checkout.said()
    assert step[:3] == ["--kill-on-bad-exit=1", "--gpu-bind=none", "--cpus-per-task=4"]
    layout = str(checkout.root / "sharding" / "gpu-2x8.toml")
    assert (name, words) == ("spec-jax", [WORDS[0], "--layout", layout, *WORDS[1:]])
    assert variables["JAX_PLATFORMS"] == "cuda,cpu" and "JAX_COMPILATION_CACHE_DIR" in variables
    assert checkout.installed() == [".[test,cuda]"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_SUBMIT_DIR": "/"}, "/ is not a checkout of spec-jax"),
        ({"SLURM_SUBMIT_DIR": "{root}"}, "this is not a Slurm job"),
    ],
)
def test_slurm_refuses_what_cannot_work(checkout, env, message):
    spool = shutil.copy(checkout.root / "launch" / "slurm_gpu.sbatch", checkout.commands)
    env = {name: value.format(root=checkout.root) for name, value in env.items()}
    result = checkout.shell("bash", spool, *WORDS, env=env)
    assert result.returncode == 1 and message in result.stderr
    assert checkout.installed() == []


# A gcloud whose slice is a folder: it copies there, and runs there what is to run on the hosts.
GCLOUD = """#!/bin/bash
if [ "$4" = scp ]; then
  for file in "${@:5}"; do [ ! -f "$file" ] || cp -p "$file" "$HOST"; done
  exit
fi
unset HF_TOKEN JAX_COMPILATION_CACHE_DIR # the hosts do not have the variables of this machine
cd "$HOST" && exec bash -c "${!#/#--command=/}"
"""


@pytest.mark.skipif(not shutil.which("git"), reason="a checkout to copy needs git")
def test_tpu_hosts_get_the_last_commit_and_the_words(checkout, tmp_path):
    git = ["git", "-C", str(checkout.root), "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        assert checkout.shell(*git, *words).returncode == 0
    (checkout.root / "uncommitted").touch()
    checkout.command("gcloud", GCLOUD)
    (host := tmp_path / "host").mkdir()
    env = {"TPU_NAME": "slice", "ZONE": "zone", "HOST": str(host), "HOME": str(host)}
    for _ in range(2):
        result = checkout.run("tpu_vm.sh", *WORDS, env=env)
        assert result.returncode == 0, result.stderr
        ((name, words, variables),) = checkout.said()
        assert (name, words) == ("spec-jax", WORDS)
        assert variables["JAX_COMPILATION_CACHE_DIR"] == f"{host}/.cache/spec-jax/xla"
    assert (host / "spec-jax" / "sharding" / "tpu-v5e-16.toml").exists()
    assert not (host / "spec-jax" / "uncommitted").exists()
    assert (host / "spec-jax" / "installed").read_text() == ".[test,tpu]\n"
    # A token travels in a file that is nobody else's, and lies nowhere any more when all runs.
    given = {"HF_TOKEN": "hf_secret", "JAX_COMPILATION_CACHE_DIR": "/mnt/a bucket/xla"}
    result = checkout.run("tpu_vm.sh", *WORDS, env=env | given)
    assert result.returncode == 0, result.stderr
    ((_, _, variables),) = checkout.said()
    assert given.items() <= variables.items()
    assert not [*tmp_path.rglob("*.token")] and not [*checkout.root.rglob("*.token")]


def test_a_token_is_no_argument(checkout):
    checkout.command("gcloud")
    checkout.command("git")
    env = {"TPU_NAME": "slice", "ZONE": "zone", "HF_TOKEN": "hf_secret"}
    assert checkout.run("tpu_vm.sh", *WORDS, env=env).returncode == 0
    (_, _, _), (_, copy, _), (_, ssh, _) = checkout.said()
    assert copy[5].endswith("spec-jax.token") and copy[6] == "slice:"
    assert not any("hf_secret" in word for word in (*copy, *ssh))
    for dry in (["--dry-run"], []):
        result = checkout.run("tpu_vm.sh", *dry, *WORDS, env=env)
        assert "hf_secret" not in result.stdout + result.stderr
    assert not [*checkout.root.rglob("*.token")]


def test_tpu_hosts_are_named_as_gcloud_wants(checkout):
    env = {"TPU_NAME": "slice", "ZONE": "zone", "PROJECT": "mine"}
    checkout.command("gcloud")
    checkout.command("git")
    assert checkout.run("tpu_vm.sh", *WORDS, env=env).returncode == 0
    (_, archive, _), (_, copy, _), (_, ssh, _) = checkout.said()
    assert archive[2:4] == ["archive", "--format=tar.gz"] and archive[-1] == "HEAD"
    where = ["--worker=all", "--zone=zone", "--project=mine"]
    tarball = archive[4].removeprefix("--output=")
    assert copy == ["compute", "tpus", "tpu-vm", "scp", tarball, "slice:", *where]
    assert ssh[:-1] == ["compute", "tpus", "tpu-vm", "ssh", "slice", *where]
    queued = {"QUEUED_RESOURCE": "request", "ZONE": "zone", "PROJECT": "mine"}
    assert checkout.run("tpu_vm.sh", *WORDS, env=queued).returncode == 0
    _, (_, copy, _), (_, ssh, _) = checkout.said()
    where = ["--node=all", *where]
    assert copy == ["compute", "tpus", "queued-resources", "scp", tarball, "request:", *where]
    assert ssh[:-1] == ["compute", "tpus", "queued-resources", "ssh", "request", *where]


@pytest.mark.parametrize("slices", [{}, {"NUM_SLICES": "2"}])
def test_xpk_submits_the_words(checkout, slices):
    env = {"CLUSTER": "mine", "IMAGE": "gcr.io/mine/spec-jax", "PROJECT": "p", "ZONE": "z"}
    env |= slices
    checkout.command("xpk")
    assert checkout.run("xpk.sh", *WORDS, env=env).returncode == 0
    ((_, words, _),) = checkout.said()
    assert words[:2] == ["workload", "create"]
    pairs = [word.removeprefix("--").split("=", 1) for word in words[2:]]
    variables = [value for name, value in pairs if name == "env"]
    assert variables == [
        "JAX_COMPILATION_CACHE_DIR=/tmp/spec-jax/xla",
        "SPEC_JAX_JOIN_SECONDS=600",
    ]
    options = dict(pair for pair in pairs if pair[0] != "env")
    command = options.pop("command")
    assert options.pop("num-slices", None) == slices.get("NUM_SLICES")
    assert options == {
        "cluster": "mine",
        "workload": "spec-jax",
        "tpu-type": "v5litepod-16",
        "docker-image": "gcr.io/mine/spec-jax",
        "project": "p",
        "zone": "z",
    }
    # xpk puts the command into a script that bash runs in the container.
    checkout.command("spec-jax")
    assert checkout.shell("bash", "-c", f"({command}) & wait").returncode == 0
    ((_, words, _),) = checkout.said()
    assert words == [WORDS[0], "--layout", "sharding/tpu-v5e-16.toml", *WORDS[1:]]


def test_xpk_gets_a_token_in_a_file(checkout, tmp_path):
    copy = tmp_path / "copy"
    checkout.command(
        "xpk",
        '#!/bin/bash\nfor word in "$@"; do case "$word" in\n'
        f'--env-file=*) cp -p "${{word#*=}}" {copy} ;; *secret*) exit 1 ;; esac; done\n',
    )
    env = {"CLUSTER": "mine", "IMAGE": "i", "HF_TOKEN": "hf_secret", "SPEC_JAX_JOIN_SECONDS": "90"}
    printed = checkout.run("xpk.sh", "--dry-run", *WORDS, env=env)
    assert printed.returncode == 0 and "hf_secret" not in printed.stdout + printed.stderr
    assert checkout.run("xpk.sh", *WORDS, env=env).returncode == 0
    assert copy.read_text().splitlines() == [
        "JAX_COMPILATION_CACHE_DIR=/tmp/spec-jax/xla",
        "SPEC_JAX_JOIN_SECONDS=90",
        "HF_TOKEN=hf_secret",
    ]
    assert copy.stat().st_mode & 0o077 == 0 and not [*checkout.root.rglob("*.env")]


@pytest.mark.parametrize(
    ("script", "env", "message"),
    [
        ("tpu_vm.sh", {"ZONE": "z"}, "the variable TPU_NAME is not set; it names the TPU VM"),
        (
            "tpu_vm.sh",
            {"ZONE": "z", "TPU_NAME": "a", "QUEUED_RESOURCE": "b"},
            "TPU_NAME and QUEUED_RESOURCE are both set; unset one of them",
        ),
        ("tpu_vm.sh", {"TPU_NAME": "t"}, "the variable ZONE is not set"),
        ("xpk.sh", {"IMAGE": "i"}, "the variable CLUSTER is not set"),
        ("xpk.sh", {"CLUSTER": "c"}, "the variable IMAGE is not set"),
    ],
)
def test_missing_variables_are_named(checkout, script, env, message):
    checkout.env.pop("ZONE", None)
    result = checkout.run(script, *WORDS, env=env)
    assert result.returncode == 1 and message in result.stderr


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict]:
    """The objects of the JobSet file, by kind."""
    text = (ROOT / "launch" / "gke_jobset.yaml").read_text()
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def test_jobset_kinds(manifests):
    assert {kind: one["apiVersion"] for kind, one in manifests.items()} == {
        "ServiceAccount": "v1",
        "Role": "rbac.authorization.k8s.io/v1",
        "RoleBinding": "rbac.authorization.k8s.io/v1",
        "JobSet": "jobset.x-k8s.io/v1alpha2",
    }
    assert {one["metadata"]["namespace"] for one in manifests.values()} == {"default"}


ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
"""GKE's names of the chips' generations."""


def job(manifests) -> dict:
    (replicated,) = manifests["JobSet"]["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]


def pod(manifests) -> dict:
    return job(manifests)["template"]["spec"]


def test_jobset_account_may_see_its_pods_and_job(manifests):
    account = manifests["ServiceAccount"]["metadata"]["name"]
    assert pod(manifests)["serviceAccountName"] == account
    binding, role = manifests["RoleBinding"], manifests["Role"]
    (subject,) = binding["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account, "namespace": "default"}
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": role["metadata"]["name"],
    }
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    # What JAX's detection of Kubernetes calls: list_namespaced_pod, read_namespaced_job.
    assert {("", "pods", "list"), ("batch", "jobs", "get")} <= allowed
    assert {verb for _, _, verb in allowed} <= {"get", "list"}


def test_jobset_fits_its_layout(manifests):
    (container,) = pod(manifests)["containers"]
    options = dict(word.removeprefix("--").split("=", 1) for word in container["args"][1:])
    layout = Layout.read(ROOT / options["layout"])
    hosts = job(manifests)["parallelism"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert hosts == job(manifests)["completions"] == layout.processes
    assert hosts * chips == layout.size
    selector = pod(manifests)["nodeSelector"]
    assert layout.chip and layout.chip.topology
    kind, shape = layout.chip.topology.split(":")
    assert selector["cloud.google.com/gke-tpu-topology"] == shape
    assert ACCELERATORS[kind] == selector["cloud.google.com/gke-tpu-accelerator"]


def test_the_table_of_slices_fits_their_layouts():
    rows = re.findall(
        r"^\| `(tpu-\S+)` \| `(\S+)` \| (\S+) \| (\d+) \| (\d+) \|$",
        (ROOT / "docs" / "pods.md").read_text(),
        re.MULTILINE,
    )
    found = {name: tuple(row) for name, *row in rows}
    expected = {}
    for file in (ROOT / "sharding").glob("tpu-*.toml"):
        layout = Layout.read(file)
        assert layout.chip and layout.chip.topology
        kind, shape = layout.chip.topology.split(":")
        if layout.slices == 1:
            hosts = layout.processes
            row = ACCELERATORS[kind], shape, str(hosts), str(layout.size // hosts)
            expected[layout.name] = row
    assert found == expected


def test_jobset_runs_spec_jax_with_volumes_that_exist(manifests):
    (container,) = pod(manifests)["containers"]
    assert container["command"] == ["spec-jax"] and container["args"][0] == "generate"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod(manifests)["volumes"]}
    (cache,) = [one["value"] for one in container["env"] if "CACHE" in one["name"]]
    paths = [word.split("=", 1)[1] for word in container["args"][1:3]]
    for path in (cache, *paths):
        assert path.startswith(tuple(f"{mount}/" for mount in mounts.values()))


def test_jobset_begins_again_unless_the_mistake_is_the_users(manifests):
    policy = manifests["JobSet"]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    assert policy["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    assert job(manifests)["backoffLimit"] == 0 and pod(manifests)["restartPolicy"] == "Never"
    (rule,) = job(manifests)["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["operator"] == "In"
    assert rule["onExitCodes"]["containerName"] == pod(manifests)["containers"][0]["name"]
    assert rule["onExitCodes"]["values"] == [2]


def test_jobset_gives_hosts_time_and_room(manifests):
    (container,) = pod(manifests)["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert int(variables["SPEC_JAX_JOIN_SECONDS"]) > distributed.JOIN_SECONDS
    assert pod(manifests)["terminationGracePeriodSeconds"] > 30  # Kubernetes' default
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert requests["google.com/tpu"] == limits["google.com/tpu"]
    assert {"cpu", "memory"} <= requests.keys()
    annotations = job(manifests)["template"]["metadata"]["annotations"]
    for name in ("cpu", "memory", "ephemeral-storage"):
        assert annotations[f"gke-gcsfuse/{name}-limit"] == "0"


def test_jobset_says_how_to_try_it_dry():
    text = (ROOT / "launch" / "gke_jobset.yaml").read_text()
    assert "kubectl create --dry-run=client -f launch/gke_jobset.yaml" in text


def test_the_image_is_for_tpus_or_gpus():
    lines = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    (base,) = [line for line in lines if line.startswith("FROM")]
    assert base in [f"FROM python:3.{minor}-slim" for minor in (11, 12, 13)]
    (install,) = [line for line in lines if line.startswith("RUN")]
    *_, what = shlex.split(install)
    assert shlex.split(install)[-4:-1] == ["-c", "constraints.txt", "-e"]
    assert "ARG ACCELERATOR=tpu" in lines[lines.index(base) :]  # an ARG before FROM is not seen
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for accelerator in ("tpu", "cuda"):
        extras = what.replace("${ACCELERATOR}", accelerator).removeprefix(".[").removesuffix("]")
        assert extras.split(",") == [accelerator, "bucket", "orbax", "serve", "speech", "train"]
        assert set(extras.split(",")) <= known.keys()
    assert "--build-arg ACCELERATOR=cuda" in "".join(lines)
