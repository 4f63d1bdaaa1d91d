"""The specification of expert layers and routers in plain torch."""
