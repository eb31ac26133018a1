"""Asynchronous units of Hopper and Blackwell: TMA, wgmma, tcgen05, and mbarriers."""
