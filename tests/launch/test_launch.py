"""The launch scripts, as far as they go without installing anything."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkouts import Checkout

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
COMMANDS = [
    p for p in sorted(LAUNCH.iterdir()) if p.suffix in (".sh", ".sbatch") and p.stem[0] != "_"
]
SCRIPTS = [*COMMANDS, LAUNCH / "_env.sh", ROOT / ".ci" / "run"]
name = lambda path: path.name  # noqa: E731


def shell(*command, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_parses(script):
    result = shell("bash", "-n", script)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_passes_shellcheck(script):
    beside_python = Path(sys.executable).parent / "shellcheck"
    shellcheck = beside_python if beside_python.exists() else shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("shellcheck is not installed (it comes with the dev extra)")
    result = shell(shellcheck, "--external-sources", script, cwd=ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", [*COMMANDS, ROOT / ".ci" / "run"], ids=name)
def test_is_executable(script):
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", COMMANDS, ids=name)
def test_help_works_anywhere_and_installs_nothing(script, tmp_path):
    copied = shutil.copytree(LAUNCH, tmp_path / "a checkout" / "launch")
    result = shell(copied / script.name, "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")
    assert f"launch/{script.name}" in result.stdout.splitlines()[0]
    assert [path.name for path in copied.parent.iterdir()] == ["launch"]


def ensure_env(checkout: Checkout, *extra: str) -> subprocess.CompletedProcess[str]:
    # Without a compiler the script would add an extra that brings one.
    script, compiler = checkout.root / "launch" / "_env.sh", {"CXX": "true"}
    return checkout.shell("bash", str(script), *extra, env=compiler)


def test_extras_only_add_up(checkout):
    for extra in ([], ["cuda"], [], ["cuda"], ["tpu"], ["cuda"], []):
        result = ensure_env(checkout, *extra)
        assert result.returncode == 0, result.stderr
    assert checkout.installed() == [".[test]", ".[test,cuda]", ".[test,cuda,tpu]"]


def test_extras_survive_a_new_environment(checkout):
    assert ensure_env(checkout, "cuda").returncode == 0
    (checkout.root / ".venv" / "bin" / "python").unlink()
    result = ensure_env(checkout)
    assert "starting over" in result.stderr
    assert checkout.installed() == [".[test,cuda]"] * 2


def test_a_change_of_the_requirements_installs_again(checkout):
    assert ensure_env(checkout).returncode == 0
    with open(checkout.root / "constraints.txt", "a") as constraints:
        constraints.write("# renewed\n")
    assert ensure_env(checkout).returncode == 0
    assert checkout.installed() == [".[test]"] * 2


PROMPT = "it's 1 < 2;\n$HOME `*` é"
# What each script must do with the same words, and the environment it needs.
CALLS = {
    "local.sh": (["--max-tokens", "3"], {}),
    "cpu_mesh.sh": (["8", "generate", PROMPT, "--seed", "1"], {}),
    "cpu_processes.sh": (["2", "generate", PROMPT, "--seed", "1"], {}),
    "gpu_local.sh": (["generate", PROMPT, "--seed", "1"], {"CUDA_VISIBLE_DEVICES": "0,3"}),
    "slurm_gpu.sbatch": (["generate", PROMPT], {"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "4"}),
    "tpu_vm.sh": (["generate", PROMPT], {"TPU_NAME": "slice", "ZONE": "zone", "PROJECT": "mine"}),
    "xpk.sh": (["generate", PROMPT], {"CLUSTER": "cluster", "IMAGE": "image", "ZONE": "zone"}),
}


def test_every_script_has_a_dry_run():
    assert set(CALLS) == {path.name for path in COMMANDS} - {"test.sh"}


@pytest.mark.parametrize("script", CALLS)
def test_dry_run_prints_what_a_run_does(checkout, script):
    words, env = CALLS[script]
    for command in ("gcloud", "xpk", "git"):
        checkout.command(command)
    checkout.command("srun", checkout.stand_in + "os.execvp('env', sys.argv[4:])\n")

    printed = checkout.run(script, "--dry-run", *words, env=env)
    assert printed.returncode == 0, printed.stderr
    assert checkout.said() == [] and checkout.installed() == []
    assert not (checkout.root / ".venv").exists() and not (checkout.root / ".cache").exists()

    pasted = checkout.shell("bash", "-c", printed.stdout + "wait\n")
    assert pasted.returncode == 0, pasted.stderr
    said = without_port(checkout.said())
    run = checkout.run(script, *words, env=env)
    assert run.returncode == 0, run.stderr
    assert said and said == without_port(checkout.said())


def test_local_drafts_by_prompt_lookup_unless_another_drafter_is_named(checkout):
    for words in ([], ["--target", "other"], ["--num-speculative-tokens", "3"]):
        said = checkout.run("local.sh", "--dry-run", "Hello", *words).stdout
        assert "--method prompt_lookup" in said
    for words in (["--method", "suffix"], ["--draft=other"]):
        said = checkout.run("local.sh", "--dry-run", "Hello", *words).stdout
        assert "prompt_lookup" not in said and "num-speculative" not in said


def test_local_takes_a_pair_of_recipes(checkout):
    said = checkout.run("local.sh", "--dry-run", "--pair", "qwen2.5-coder", "Hello").stdout
    recipes = re.findall(r"/checkpoints/(\S+\.toml)", said)
    assert recipes == ["qwen2.5-coder-1.5b-instruct.toml", "qwen2.5-coder-0.5b-instruct.toml"]
    assert all((ROOT / "checkpoints" / each).is_file() for each in recipes)
    assert "--prompt Hello" in said and "prompt_lookup" not in said
    result = checkout.run("local.sh", "--dry-run", "--pair", "other", "Hello")
    assert result.returncode == 1 and "--pair is 'other'" in result.stderr


def without_port(calls: list) -> list[str]:
    return sorted(re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", str(call)) for call in calls)


@pytest.mark.parametrize("command", ["generate", "chat", "plan", "env"])
@pytest.mark.parametrize("script", ["cpu_mesh.sh 8", "cpu_processes.sh 2", "gpu_local.sh"])
def test_options_of_the_caller_come_last(checkout, script, command):
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    result = checkout.run(*script.split(), command, "--layout", "mine", env=env)
    assert result.returncode == 0, result.stderr
    layout = {"c": "cpu-8", "8": "cpu-8", "2": "cpu-2x2"}.get(script[-1], "gpu-1")
    for _, words, variables in checkout.said():
        assert words[0] == command and words[-2:] == ["--layout", "mine"]
        added = words[1:-2]
        if command == "env":
            assert added == []
        else:
            assert added[-2:] == ["--layout", str(checkout.root / "sharding" / f"{layout}.toml")]
            assert ("--target" in added) == script.startswith("cpu")
        assert variables["JAX_COMPILATION_CACHE_DIR"].endswith("/spec-jax/xla")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cpu_mesh.sh", "3", "generate"], "sharding/cpu-N.toml for N = 1 2 4 8"),
        (["cpu_mesh.sh", "generate"], "no layout for N = 'generate'"),
        (["cpu_processes.sh", "3", "generate"], "sharding/cpu-Nx2.toml for N = 2"),
        (["cpu_processes.sh"], "no layout for N = ''"),
    ],
    ids=" ".join,
)
def test_a_number_without_a_layout_is_refused(checkout, words, message):
    result = checkout.run(*words)
    assert result.returncode == 1 and message in result.stderr
    assert checkout.installed() == []


@pytest.mark.parametrize(
    ("visible", "listed", "expected"),
    [
        (None, "GPU 0: H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-2)\n", "gpu-1.toml"),
        (None, "GPU 0: H200\nGPU 1: H200\n", "gpu-2.toml"),
        ("4,5,6,7", "GPU 0: H200\n", "gpu-4.toml"),
        ("0,1,2", "GPU 0: H200\n", "no layout for N = '3': there is sharding/gpu-N.toml for N = 1"),
    ],
)
def test_gpus_are_counted(checkout, visible, listed, expected):
    checkout.command("nvidia-smi", f"#!/bin/sh\nprintf '{listed}'\n")
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    result = checkout.run("gpu_local.sh", "--dry-run", "generate", "Hello", env=env)
    assert expected in result.stdout + result.stderr
    assert result.returncode == (0 if expected.endswith(".toml") else 1)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "no GPU: CUDA_VISIBLE_DEVICES is ''; "),
        ({}, "no GPU: nvidia-smi -L lists none; "),
    ],
)
def test_without_a_gpu_only_a_dry_run_goes_on(checkout, env, said):
    checkout.command("nvidia-smi", "#!/bin/sh\nexit 9\n")
    dry = checkout.run("gpu_local.sh", "--dry-run", "generate", "Hello", env=env)
    assert dry.returncode == 0 and "sharding/gpu-1.toml" in dry.stdout
    assert f"{said}this is what one would run" in dry.stderr
    result = checkout.run("gpu_local.sh", "generate", "Hello", env=env)
    assert result.returncode == 1 and f"{said}launch/local.sh runs on the CPU" in result.stderr


def test_processes_know_each_other(checkout):
    result = checkout.run("cpu_processes.sh", "2", "generate", PROMPT)
    assert result.returncode == 0, result.stderr
    variables = [said[2] for said in checkout.said()]
    assert sorted(one["JAX_PROCESS_ID"] for one in variables) == ["0", "1"]
    for one in variables:
        assert one["JAX_NUM_PROCESSES"] == "2" and one["JAX_PLATFORMS"] == "cpu"
        assert one["JAX_COORDINATOR_ADDRESS"] == variables[0]["JAX_COORDINATOR_ADDRESS"]
        assert re.fullmatch(r"127\.0\.0\.1:2\d{4}", one["JAX_COORDINATOR_ADDRESS"])
        assert one["JAX_COORDINATOR_BIND_ADDRESS"] == one["JAX_COORDINATOR_ADDRESS"]


@pytest.fixture
def read_by(checkout):
    """Makes processes that read standard input; tells what each of them has read."""

    def install(method: str = "read"):
        # Files, since what two processes write to one stream may mix.
        seen = checkout.root / "seen"
        seen.mkdir()
        checkout.spec_jax(
            f"""#!{sys.executable}
import os, pathlib, sys
me, text = os.environ["JAX_PROCESS_ID"], sys.stdin.{method}()
print("out", me, text)
pathlib.Path({str(seen)!r}, me).write_text(text)
"""
        )
        return lambda: [(seen / str(i)).read_text() for i in range(2)]

    return install


def test_every_process_reads_what_is_piped_in_and_process_0_prints(checkout, read_by):
    seen, text = read_by(), "Hello\n" * 20_000
    result = checkout.run("cpu_processes.sh", "2", "generate", input=text)
    assert (result.returncode, result.stdout) == (0, f"out 0 {text}\n"), result.stderr
    assert seen() == [text, text]


def test_at_a_terminal_process_0_reads(checkout, read_by):
    seen = read_by("readline")
    ours, theirs = pty.openpty()
    os.write(ours, b"Hello\n")
    result = checkout.run("cpu_processes.sh", "2", "generate", stdin=theirs)
    os.close(ours)
    os.close(theirs)
    assert (result.returncode, result.stdout) == (0, "out 0 Hello\n\n"), result.stderr
    assert seen() == ["Hello\n", ""]


def test_standard_input_may_be_closed(checkout, read_by):
    seen = read_by()
    script = str(checkout.root / "launch" / "cpu_processes.sh")
    result = checkout.shell("bash", "-c", '"$0" "$@" <&-', script, "2", "generate")
    assert (result.returncode, result.stdout) == (0, "out 0 \n"), result.stderr
    assert seen() == ["", ""]


@pytest.mark.parametrize(
    ("codes", "expected"), [((0, 0), 0), ((3, 0), 3), ((0, 7), 7), ((3, 7), 3)], ids=str
)
def test_exit_code_is_that_of_the_first_process_to_fail_in_order(checkout, codes, expected):
    checkout.spec_jax(
        f"#!/bin/sh\nset -- {codes[0]} {codes[1]}\n[ $JAX_PROCESS_ID = 0 ] || shift\nexit $1\n"
    )
    assert checkout.run("cpu_processes.sh", "2", "generate", "x").returncode == expected


# A spec-jax that works until a peer has not been heard of for two seconds, or forever. Like one
# that JAX runs in several processes it pays no heed to SIGTERM.
PEER = """#!{python}
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mine = pathlib.Path(sys.argv[-1], os.environ["JAX_PROCESS_ID"])
mine.write_text(str(os.getpid()))
while True:
    mine.touch()
    time.sleep(0.05)
    silent = [time.time() - peer.stat().st_mtime for peer in mine.parent.iterdir()]
    if {notices} and max(silent) > 2:
        sys.exit(1)
"""


def kill(folder: Path, victim: str, number: signal.Signals, notices: bool):
    """Starts two processes, sends a signal to one or to the script, and waits until all are gone.

    Returns the script's exit code, what it said, and the seconds that it took.
    """
    checkout = Checkout(folder)
    checkout.spec_jax(PEER.format(python=sys.executable, notices=notices))
    if number != signal.SIGKILL or victim != "script":  # as if there were no setpriv
        checkout.command("setpriv", '#!/bin/sh\nshift 2\nexec "$@"\n')
    script = checkout.root / "launch" / "cpu_processes.sh"
    if victim != "script" and not notices:
        script.write_text(script.read_text().replace("GRACE=20", "GRACE=1"))
    (signs := folder / "peers").mkdir()
    peers = [signs / "0", signs / "1"]
    silent, held = os.pipe()  # a standard input that never ends
    with subprocess.Popen(
        [script, "2", "generate", str(signs)],
        env=checkout.env,
        stdin=silent,
        stderr=subprocess.PIPE,
        text=True,
    ) as launched:
        while not all(peer.exists() and peer.read_text() for peer in peers):
            assert launched.poll() is None
            time.sleep(0.05)
        os.kill(launched.pid if victim == "script" else int((signs / victim).read_text()), number)
        began = time.monotonic()
        # All of them hold standard error, so it ends when the last of them has.
        _, said = launched.communicate(timeout=60)
        took = time.monotonic() - began
    os.close(silent)
    os.close(held)
    return launched.returncode, said, took


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL]
VICTIMS = ["0", "1"]
KILLS = [
    *(("script", number, False) for number in SIGNALS),
    *((victim, signal.SIGKILL, notices) for victim in VICTIMS for notices in (True, False)),
]
HAS_SETPRIV = shutil.which("setpriv") is not None
"""Without it nothing can be done about a script that gets SIGKILL."""


@pytest.fixture(scope="module")
def heeded():
    """Signals that a run in the background ignores, and that its children would ignore too."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def killed(heeded, tmp_path_factory):
    """What `kill` returns for each of `KILLS`: all at once, since most of it is waiting."""
    possible = [each for each in KILLS if HAS_SETPRIV or each[:2] != ("script", signal.SIGKILL)]
    with ThreadPoolExecutor(len(possible)) as pool:
        return {each: pool.submit(kill, tmp_path_factory.mktemp("it"), *each) for each in possible}


@pytest.mark.parametrize("number", SIGNALS)
def test_no_process_outlives_the_script(killed, number):
    if number == signal.SIGKILL and not HAS_SETPRIV:
        pytest.skip("without setpriv nothing can be done about SIGKILL")
    code, said, took = killed["script", number, False].result()
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    assert took < 10, said


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_lost_process_ends_all(killed, victim):
    code, said, took = killed[victim, signal.SIGKILL, True].result()
    assert code == (137 if victim == "0" else 1)
    assert f"process {victim} was ended by signal 9" in said and took < 10, said


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_does_not_notice_is_ended(killed, victim):
    code, said, took = killed[victim, signal.SIGKILL, False].result()
    assert code == (137 if victim == "0" else 1)
    assert "ending 1 of 2 processes" in said and took < 10, said
