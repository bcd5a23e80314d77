"""HybridParallel: dense parameters on every process, tables divided among them by TorchRec (arXiv:2104.05158)."""
