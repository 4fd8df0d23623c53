"""What the batching policy makes of throughput and latency: the real batcher, everything else simulated."""
