"""One attention call on one device, and launches of its single kernels: the same ones wherever they are
compiled, checked and timed, so that a kernel that was compiled offline is found in Triton's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tritoncp import captured, engines
from tritoncp.expressions import score_of
from tritoncp.kernels.configs import Config
from tritoncp.kernels.engine import Mods, TritonEngine
from tritoncp.kernels.launch import Launch, Launches
from tritoncp.masks import create_block_mask, full_mask
from tritoncp.mods import Mod
from tritoncp.offline import Job, options_of
from tritoncp.perf.cases import MASKS
from tritoncp.plan import build


class Problem:
    """Tensors of a call as the schedule of one rank has them.

    job:   says shapes, mask and score_mod
    given: q [1, Hq, S, D], k, v and dout [1, Hq, S, E]; memory that nobody looks at unless given
    """

    def __init__(self, job: Job, device: torch.device, given: Sequence[Tensor] = ()) -> None:
        assert job.call is not None
        mask, heads, kv_heads, seq = job.call
        (d, e), dtype = job.dims, getattr(torch, job.dtype)
        if not given:
            shapes = (heads, d), (kv_heads, d), (kv_heads, e), (heads, e)
            given = [torch.empty(1, h, seq, width, dtype=dtype, device=device) for h, width in shapes]
        self.q, self.k, self.v, self.dout = given
        closed = MASKS[mask].closed(seq)
        whole = full_mask(seq, seq) if closed is None else create_block_mask(closed, 1, 1, seq, seq)
        self._tables = build(whole).tables(str(device), 1, heads)
        self._mods = mods_of(job.score, self.q)
        self._out = torch.empty_like(self.dout)
        self._lse, self._delta = torch.empty(2, 1, heads, seq, device=device).unbind()
        self._dq, self._dk, self._dv = map(torch.empty_like, (self.q, self.k, self.v))
        self._dq_sum = torch.empty_like(self.q, dtype=torch.float32)  # a fused kernel adds to it

    def results(self, kernel: str) -> dict[str, Tensor]:
        """What a kernel writes."""
        dkdv = {"dk": self._dk, "dv": self._dv}
        return {
            "forward": {"out": self._out},
            "dq": {"dq": self._dq},
            "dkdv": dkdv,
            "fused": {"dq": self._dq_sum, **dkdv},
        }[kernel]

    def launch(
        self, kernel: str, config: Config | None, arch: str | None = None
    ) -> Launch | Launches | Callable[[], None]:
        """A kernel with these tiles; those of the rule for None. ``arch``: of another GPU than the device."""
        options = options_of(kernel, config) | {"deterministic": False}
        scale = self.q.shape[3] ** -0.5
        engine = TritonEngine(self._mods, scale, options | {"FUSED_BACKWARD": kernel == "fused"}, arch)
        q, k, v, tables = self.q, self.k, self.v, self._tables
        if kernel == "forward":
            return engine.loops(q, k, v, tables, out=self._out, lse=self._lse)
        if kernel == "delta":
            return engine.delta(self._out, self.dout, None, self._delta)
        given = (q, k, v, self.dout, self._lse, self._delta, tables)
        if kernel == "dq":
            return engine.dq(*given, dq=self._dq)
        return engine.dkdv(*given, dk=self._dk, dv=self._dv, dq=self._dq_sum if kernel == "fused" else None)


def mods_of(score: str, q: Tensor, mask: Mod | None = None) -> Mods:
    """A named score_mod as kernels take it, for these queries, and a mask_mod. What the former captures may
    want gradients: they go nowhere."""
    mod = captured.score_of(score_of(score, q.shape[1], q.device), q) if score else None
    wanted = [mod.tensors[i] for i in mod.wants] if mod else []
    grads = [torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in wanted]
    return engines.launched(mask, mod, q.device, grads)
