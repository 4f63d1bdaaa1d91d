"""From a call to what runs: Call, launch plans, compilation, and the run on torch tensors."""
