"""Layout files, what they refuse, and how they fit models."""

from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import PartitionSpec as P

from spec_jax.errors import ConfigError
from spec_jax.planning.abstract import stand_ins
from spec_jax.sharding import Layout, Rule

FILES = sorted((Path(__file__).parents[2] / "sharding").glob("*.toml"))
SIZES = {"vocab": 64, "embed": 32, "heads": 16, "kv_heads": 8, "mlp": 96}
WHOLE = """
platform = "cpu"
[mesh]
data = 2
model = 4
[target]
batch = "data"
heads = "model"
kv_heads = "model"
mlp = "model"
vocab = { axes = ["model"], on_indivisible = "replicate" }
"""
CHIP = """
[chip]
name = "mine"
memory_gib = 1
memory_gb_per_s = 1
bf16_tflops = 1
link_gb_per_s = 1
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def layout(*mesh, target=(), draft=(), **options) -> Layout:
    return Layout("mine", mesh, "cpu", target=target, draft=draft, **options)


def rules(axes: str | tuple[str, ...], *names: str, replicate=False):
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple((name, Rule(axes, replicate)) for name in names)


def place(fits: Layout, role: str = "target", **sizes: int):
    return fits.place(role, sizes, jax.devices()[: fits.size])


def test_a_file_says_what_it_says(written):
    read = Layout.read(written(WHOLE))
    assert (read.name, read.platform, read.size) == ("mine", "cpu", 8)
    assert read.mesh == (("data", 2), ("model", 4))
    assert dict(read.target)["vocab"] == Rule(("model",), replicate=True)
    assert read.draft == () and read.chip is None
    assert read.all_reduce_dtype == "float32"


def test_the_dtype_of_sums_is_read_written_and_handed_on(written, tmp_path):
    read = Layout.read(written(WHOLE.replace("[mesh]", 'all_reduce_dtype = "bfloat16"\n[mesh]')))
    read.write(tmp_path / "again.toml")
    placement = place(Layout.read(tmp_path / "again.toml"), **SIZES)
    assert placement.all_reduce_dtype_of("bfloat16", "mlp") == "bfloat16"
    assert placement.all_reduce_dtype_of("bfloat16", "embed") == "float32"  # nothing is summed
    assert placement.all_reduce_dtype_of("float32", "mlp") == "float32"
    with pytest.raises(ConfigError, match="all_reduce_dtype is 'int8'; choose one of float32, b"):
        layout(("model", 2), all_reduce_dtype="int8")


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_mesh_has_no_more_devices_than_exist(written, platform):
    text = WHOLE.replace('"cpu"', f'"{platform}"').replace("model = 4", f"model = {2**63 - 1}")
    with pytest.raises(ConfigError, match=r"its mesh has 18,446,744,073,709,551,614 devices; exp"):
        Layout.read(written(text))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_files_are_read(file):
    read = Layout.read(file)
    assert file.stem.startswith(read.platform)
    assert (read.chip is None) == (read.platform == "cpu")
    assert read.size % read.processes == 0
    sizes = {"vocab": 49152, "embed": 512, "heads": 64, "kv_heads": 4, "mlp": 4096}
    for role in ("target", "draft"):
        assert read.place(role, sizes, stand_ins(read)).mesh.size == read.size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("platform", "plattform"), "unknown key 'plattform'. Did you mean 'platform'?"),
        (('"cpu"', '"vax"'), "platform is 'vax'. Known: cpu, gpu, tpu."),
        (("model = 4", "model = 0"), "mesh.model is 0; it should be at least 1"),
        (("model = 4", "modell = 4"), "'model'. Did you mean 'modell'?"),
        (("mlp =", "mpl ="), "target.mpl is not a logical axis. Did you mean 'mlp'?"),
        (('mlp = "model"', "mlp = 4"), "target.mlp is 4; it should be a mesh axis"),
        (('batch = "data"', 'batch = "model"'), "'model', which target.batch uses already"),
        (
            ('"replicate"', '"ignore"'),
            "on_indivisible is 'ignore'. Known: error, replicate.",
        ),
        (('["model"]', '["model", "model"]'), "'model', which target.vocab uses already"),
        (
            ("[mesh]", 'all_reduce_dtype = "int8"\n[mesh]'),
            "all_reduce_dtype is 'int8'. Known: bfloat16, float32.",
        ),
        (("data = 2", "data = 2 2"), "is not a TOML file"),
        (("[mesh]", "processes = 3\n[mesh]"), "8 devices cannot be shared evenly by 3"),
        (("[mesh]", "slices = 0\n[mesh]"), "slices is 0; it should be at least 1"),
        (("[mesh]", "slices = 3\n[mesh]"), "mesh.data is 2, which 3 slices cannot share evenly"),
        (("[mesh]", "slices = 2\n[mesh]"), "processes is 1, which 2 slices cannot share evenly"),
        (("model = 4", "model = 2.5"), "mesh.model is 2.5; it should be a valid integer"),
        (("[mesh]\ndata = 2\nmodel = 4", ""), "mesh is missing; add it"),
        (("[target]", "[chip]\nname = 1\n[target]"), "chip.name is 1; it should be a valid string"),
        (("[target]", CHIP + "host_gb_per_s = 0\n[target]"), "chip.host_gb_per_s is 0; it should"),
    ],
)
def test_mistakes_are_named(written, change, message):
    assert change[0] in WHOLE
    with pytest.raises(ConfigError) as error:
        Layout.read(written(WHOLE.replace(*change)))
    assert message in str(error.value)


def test_nothing_but_rows_is_sharded_across_slices(written, tmp_path):
    text = WHOLE.replace("[mesh]", "slices = 2\nprocesses = 4\n[mesh]")
    read = Layout.read(written(text))
    assert read.slices == 2
    read.write(tmp_path / "again.toml")
    assert Layout.read(tmp_path / "again.toml").slices == 2
    with pytest.raises(ConfigError, match=r"target\.mlp uses the mesh axis 'data', which lies"):
        Layout.read(written(text.replace('mlp = "model"', 'mlp = ["data", "model"]')))
    with pytest.raises(ConfigError, match="slices is 2, but GPUs make none; leave it out"):
        Layout.read(written(text.replace('"cpu"', '"gpu"')))


@pytest.mark.parametrize(("slices", "found"), [(1, 2), (2, 1), (2, 4)])
def test_the_number_of_slices_is_checked(slices, found):
    """JAX can make no mesh of devices of several slices unless it is told that they are."""
    devices = [SimpleNamespace(platform="tpu", slice_index=i % found) for i in range(8)]
    fits = Layout("mine", (("data", 2), ("model", 4)), "tpu", processes=2, slices=slices)
    with pytest.raises(ConfigError, match=f"for {slices} TPU slices, and the devices make {found}"):
        fits.place("target", SIZES, devices)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        Layout.read(tmp_path / "none.toml")


def test_indivisible_sizes_are_refused_or_replicated():
    mesh = ("model", 8)
    with pytest.raises(ConfigError) as error:
        place(layout(mesh, target=rules("model", "mlp")), mlp=12)
    assert "mlp of the target into 8 shards" in str(error.value) and "its 12" in str(error.value)
    fits = layout(mesh, target=rules("model", "mlp", "vocab", replicate=True))
    placement = place(fits, mlp=12, vocab=16)
    assert placement.spec("embed", "mlp") == P(None, None)
    assert placement.spec("embed", "vocab") == P(None, ("model",))


def test_few_key_value_heads_lie_on_groups_of_devices():
    fits = layout(("model", 8), target=rules("model", "heads", "kv_heads"))
    placement = place(fits, heads=16, kv_heads=2)
    assert placement.num_shards("heads") == 8 and placement.num_shards("kv_heads") == 2
    # The query heads of one key/value head are on the same devices.
    outer, inner = placement.mesh.axis_names
    assert placement.spec("heads", "kv_heads") == P((outer, inner), (outer,))
    alone = place(fits, heads=16, kv_heads=1)
    assert alone.num_shards("heads") == 8 and alone.num_shards("kv_heads") == 1
    with pytest.raises(ConfigError, match="kv_heads of the target into 8 shards"):
        place(fits, heads=24, kv_heads=3)


def test_models_share_the_order_of_the_devices():
    mega = rules("model", "heads", "kv_heads")
    fits = layout(("model", 8), target=mega, draft=mega)
    target, draft = place(fits, heads=8, kv_heads=4), place(fits, "draft", heads=8, kv_heads=2)
    assert target.mesh.devices.ravel().tolist() == draft.mesh.devices.ravel().tolist()
    assert dict(target.mesh.shape) == {"model_0": 4, "model_1": 2}
    assert dict(draft.mesh.shape) == {"model_0": 2, "model_1": 4}
    assert target.num_shards("heads") == draft.num_shards("heads") == 8


def test_the_number_of_devices_is_checked():
    here = jax.device_count()
    with pytest.raises(ConfigError, match=f"for {here + 1} devices, and there are {here}"):
        layout(("model", here + 1)).place("target", SIZES)
    with pytest.raises(ConfigError, match=f"for 2 devices, and there are {here}"):
        layout(("model", 2), processes=2).place("target", SIZES)
    assert layout(("model", 2)).place("target", SIZES).mesh.size == 2
