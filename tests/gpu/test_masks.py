"""Masks whose tensors live on the GPU: classified there by the kernel that evaluates pairs."""

import torch

import tritoncp


def test_a_mask_of_gpu_tensors_is_the_one_of_their_copies() -> None:
    ids = torch.randint(0, 9, (2, 4096)).sort(1).values
    noise = torch.randint(0, 3, (4096,))

    def mod_on(device):
        device_ids, dots = ids.to(device), noise.to(device)
        return lambda b, h, q, kv: (device_ids[b, q] == device_ids[b, kv]) & (dots[q] <= dots[kv] + h)

    gpu_mask = tritoncp.create_block_mask(mod_on("cuda"), 2, 2, 4096, 4096)
    cpu_mask = tritoncp.create_block_mask(mod_on("cpu"), 2, 2, 4096, 4096)
    assert gpu_mask.runs == cpu_mask.runs
