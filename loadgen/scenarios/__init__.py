"""Load tests during which the cluster changes: ``python -m loadgen.scenarios NAME`` from a checkout."""
