"""From a call to its execution: Call, launch plans, compilation, and the run on torch tensors."""
