"""The gated delta rule: kernel and plan."""
