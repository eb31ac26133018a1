"""Known faults of Triton's compiler and of ptxas: refused options, avoided tiles, messages."""

import itertools
import sys
from dataclasses import asdict, replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tritoncp
from tritoncp.call.prepare import prepare
from tritoncp.call.read import Arguments
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.operands import Mods
from tritoncp.kernels.options import TileRequest, check_options, choose
from tritoncp.kernels.tile_rules import Config, architecture, default
from tritoncp.kernels.toolchain import BUNDLED, broken_ptxas_paths, ptxas_faults, ptxas_for
from tritoncp.perf.problem import Problem
from tritoncp.tuning.targets import Target, candidates, targets, without_faults

VERSIONS = {"3.6.0": False, "3.7.0": False, "3.7.0+git5": False, "3.7.1": True, "3.7.1+git12": True}
VERSIONS |= {"3.8.0": True, "3.10.0": True, "4.0.0": True}
NVIDIA = ("sm_80", "sm_90", "sm_100")
ARCHS = (*NVIDIA, "gfx942")
PAIRS = list(itertools.product(ARCHS, VERSIONS))
BACKWARD = ("dq", "dkdv", "fused")
FAKE = FakeTensorMode()
OPTIONS = [{"FUSED_BACKWARD": True}, {"FLIP": True}, {"bwd_FLIP": True}]


@pytest.fixture
def pretend(monkeypatch, gpus):
    """Pretend that this machine has a GPU of an architecture, and a version of Triton."""

    def set_up(arch: str, version: str) -> bool:
        monkeypatch.setattr("triton.__version__", version)
        gpus(arch, available=False)
        return arch == "sm_90" and not VERSIONS[version]

    monkeypatch.delenv("TRITONCP_UNSAFE_FUSED", raising=False)
    return set_up


def refusal(call) -> str:
    """The message of the ValueError that a call raises; "" where it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def call_on_gpu(**options) -> str:
    """The refusal of a call with fake GPU tensors."""
    with FAKE:
        x = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device="cuda")
    plan = tritoncp.make_plan(tritoncp.full_mask(128, 128))
    return refusal(lambda: prepare(Arguments(x, x, x, kernel_options=options), plan))


def tiles(kind: str, arch: str, options: dict) -> Config:
    return choose(TileRequest(kind, arch, 64, torch.bfloat16, 128, 128), options)


@pytest.mark.sample(54)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize(("arch", "version"), PAIRS)
def test_an_affected_option_is_refused_by_the_call_and_by_the_engine(arch, version, options, pretend):
    affected = pretend(arch, version)
    for say in (call_on_gpu(**options), refusal(lambda: TritonEngine(Mods(), 1.0, options, arch))):
        assert bool(say) is affected
        if affected:
            (option,) = options
            for part in (
                f"{option}=True",
                f"Triton {version}",
                "gradients",
                "sm_90",
                "triton 3.7.1",
                "leave",
            ):
                assert part in say
            assert ("TRITONCP_UNSAFE_FUSED=1" in say) is (option == "FUSED_BACKWARD")
            assert len(say) < 300 and "\n" not in say, "a benchmark keeps one short line"


@pytest.mark.interpreted
def test_options_of_the_cpu_engine_need_no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    check_options({"FUSED_BACKWARD": True, "FLIP": True}, architecture(torch.device("cpu")))


def test_a_compiled_call_is_refused_in_its_forward_pass(pretend, monkeypatch):
    pretend("sm_90", "3.7.0")
    monkeypatch.setattr("tritoncp.call.engine_factory.architecture", lambda device: "sm_90")
    call = torch.compile(tritoncp.flex_attention, backend="eager", fullgraph=True)
    x = torch.randn(1, 1, 16, 16)
    with pytest.raises(ValueError, match="FUSED_BACKWARD=True: Triton"):
        call(x, x, x, None, tritoncp.causal(), kernel_options={"FUSED_BACKWARD": True})


@pytest.mark.parametrize("option", ["FLIP", "bwd_FLIP"])
def test_the_stronger_option_decides(option, pretend):
    pretend("sm_90", "3.7.0")
    TritonEngine(Mods(), 1.0, {option: False, "fwd_FLIP": True, "FUSED_BACKWARD": False}, "sm_90")
    TritonEngine(Mods(), 1.0, {"FLIP": True, "bwd_FLIP": False}, "sm_90")
    assert "bwd_FLIP=True" in refusal(
        lambda: TritonEngine(Mods(), 1.0, {"FLIP": False, "bwd_FLIP": True}, "sm_90")
    )


def test_the_variable_allows_only_the_fused_kernel(pretend, monkeypatch):
    pretend("sm_90", "3.7.0")
    monkeypatch.setenv("TRITONCP_UNSAFE_FUSED", "0")
    assert call_on_gpu(FUSED_BACKWARD=True)
    monkeypatch.setenv("TRITONCP_UNSAFE_FUSED", "1")
    assert not call_on_gpu(FUSED_BACKWARD=True)
    assert not tiles("fused", "sm_90", {"FUSED_BACKWARD": True}).FLIP
    assert call_on_gpu(FUSED_BACKWARD=True, FLIP=True) and call_on_gpu(FLIP=True)


@pytest.mark.parametrize(("arch", "version"), PAIRS)
def test_no_tiles_of_a_launch_have_flip_where_it_is_compiled_wrong(arch, version, pretend, monkeypatch):
    """For default tiles, measured tiles and tiles of options, also after calls under another Triton."""
    pretend(arch, "3.7.1")
    for kind in BACKWARD:
        tiles(kind, arch, flipped(kind))
    affected = pretend(arch, version)
    monkeypatch.setenv("TRITONCP_UNSAFE_FUSED", "1")
    for kind, dim, tma in itertools.product(BACKWARD, (64, 128, 192, 256), (False, True)):
        rule = default(kind, arch, dim, torch.bfloat16, tma)
        assert not (affected and rule.FLIP)
        request = TileRequest(kind, arch, dim, torch.bfloat16, 128, 128, tma)
        config = choose(request, flipped(kind))
        rule = replace(rule, num_stages=config.num_stages)
        assert config == (rule if affected else Config(64, 64, 8, 1, FLIP=True))
        for option in ("FLIP", "bwd_FLIP"):
            assert bool(refusal(lambda: choose(request, {option: True}))) is affected  # noqa: B023


@pytest.mark.parametrize(("arch", "version"), PAIRS)
def test_one_stage_where_no_fence_follows_asynchronous_copies(arch, version, pretend):
    affected = arch in ("sm_90", "sm_100") and not VERSIONS[version]
    for options, tma in itertools.product(({}, {"num_stages": 3}, {"USE_TMA": False}), (False, True)):
        call = TileRequest("forward", arch, 128, torch.bfloat16, 128, 128, tma), options
        pretend(arch, "3.7.1")
        want = choose(*call)
        pretend(arch, version)
        assert choose(*call) == (replace(want, num_stages=1) if affected and not want.USE_TMA else want)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_fewer_than_64_rows_of_scores_are_not_flipped_on_hopper(arch, pretend):
    """Triton lets the next copy of the loop overwrite memory that wgmma still reads."""
    pretend(arch, "3.7.1")
    for kind, m, n in itertools.product(BACKWARD, (32, 64), (32, 64)):
        names = {"dq": "2"}.get(kind, "1")
        options = {f"BLOCK_M{names}": m, f"BLOCK_N{names}": n, "bwd_FLIP": True}
        right = arch != "sm_90" or (n if kind == "dq" else m) == 64
        assert tiles(kind, arch, options).FLIP is right
        target = Target(kind, Problem("causal", 4096, 8, 2, 64, 64))
        few = [
            c for c in candidates(target, arch) if c.FLIP and (c.BLOCK_N if kind == "dq" else c.BLOCK_M) < 64
        ]
        assert bool(few) is (arch != "sm_90")


def flipped(kind: str) -> dict:
    """Options with measured tiles of a pass."""
    return {"CONFIGS": ((kind, tuple(asdict(Config(64, 64, 8, 1, FLIP=True)).items())),)}


@pytest.mark.parametrize(("arch", "version"), PAIRS)
def test_a_fused_launch_is_refused_for_an_engine_without_an_architecture(arch, version, pretend):
    affected = pretend(arch, version)
    TritonEngine(Mods(), 1.0, {"FUSED_BACKWARD": True})
    assert bool(refusal(lambda: tiles("fused", arch, {"FUSED_BACKWARD": True}))) is affected
    assert not refusal(lambda: tiles("dkdv", arch, {}))


@pytest.mark.sample(19)
@pytest.mark.parametrize(("arch", "version"), PAIRS)
def test_the_tuner_leaves_out_the_fused_kernel_with_a_message_and_flip(arch, version, pretend, monkeypatch):
    affected = pretend(arch, version)
    for kernel, dim in itertools.product(BACKWARD, (64, 256)):
        configs = candidates(Target(kernel, Problem("causal", 4096, 8, 2, dim, dim)), arch)
        assert any(config.FLIP for config in configs) is not affected
    whole, fused = (
        targets(["8x2,64,4096"], ["full"], ops, "bfloat16") for ops in (["bwd", "fused"], ["fused"])
    )
    selection, fault = without_faults(whole, arch)
    assert [target.kernel for target in selection] == ["dq", "dkdv", *([] if affected else ["fused"])]
    assert ("fused is left out: Triton" in fault and "triton 3.7.1" in fault) is affected
    assert bool(refusal(lambda: without_faults(fused, arch))) is affected
    monkeypatch.setenv("TRITONCP_UNSAFE_FUSED", "1")
    assert without_faults(fused, arch) == (fused, "")


def fake_ptxas(folder, output: str = "Cuda compilation tools, release 13.1, V13.1.80") -> str:
    """Make a program that prints the version of a ptxas."""
    path = folder / "ptxas"
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def no_paths(monkeypatch):
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("arch", NVIDIA)
def test_the_default_ptxas_is_bundled_with_triton(arch, no_paths):
    used = ptxas_for(arch)
    assert used.origin == BUNDLED and "triton/backends/nvidia/bin/ptxas" in used.path
    assert len(used.version.split(".")) == 3 and used.version in str(used) and used.path in str(used)


@pytest.mark.parametrize("arch", NVIDIA)
def test_a_variable_selects_another_ptxas(arch, no_paths, monkeypatch, tmp_path):
    """Triton 3.9 assembles also for Hopper with the ptxas of Blackwell."""
    variables = {arch: ptxas_for(arch).variable for arch in NVIDIA}
    assert variables["sm_80"] == "TRITON_PTXAS_PATH" and variables["sm_100"] == "TRITON_PTXAS_BLACKWELL_PATH"
    monkeypatch.setenv(name := variables[arch], path := fake_ptxas(tmp_path))
    assert ptxas_for(arch) == ("13.1.80", path, name)
    for other, variable in variables.items():
        assert ptxas_for(other).origin == (name if variable == name else BUNDLED)


@pytest.mark.parametrize("said", ["hello", "Cuda compilation tools, release 12.9"])
def test_a_ptxas_with_a_shorter_version_is_accepted(said, no_paths, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_PTXAS_PATH", path := fake_ptxas(tmp_path, said))
    used = ptxas_for("sm_80")
    assert used.version == "12.9" if "12.9" in said else used.path != path


def test_a_ptxas_that_does_not_run_is_an_error_with_a_reason(no_paths, monkeypatch, tmp_path):
    """Triton does not pass over a file that may not be executed."""
    path = tmp_path / "ptxas"
    path.write_text("")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
    with pytest.raises(LookupError, match="no ptxas runs for sm_80"):
        ptxas_for("sm_80")
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "false")  # a program that fails
    for line, used in zip(broken_ptxas_paths(), (str(path), "false"), strict=True):
        assert f"PATH={used}: this ptxas does not run" in line


def test_a_triton_without_nvidias_compiler_is_an_error_with_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.compiler", None)
    with pytest.raises(LookupError, match="Triton's compiler for NVIDIA's GPUs is not installed"):
        ptxas_for("sm_90")


@pytest.mark.parametrize(
    ("version", "faults"),
    [
        ("12.8.93", 2),
        ("12.9.86", 2),
        ("13.0.88", 2),
        ("13.1.80", 1),
        ("13.3", 0),
        ("13.3.33", 0),
        ("14.0", 0),
    ],
)
def test_ptxas_faults_depend_on_the_version_and_affect_only_hopper(version, faults):
    assert len(list(ptxas_faults("sm_90", version))) == faults
    assert not any(list(ptxas_faults(arch, version)) for arch in ("sm_80", "sm_89", "sm_100", "gfx942"))
