"""Which requests a step computes: fair queue, scheduler, preemption and the estimate of waiting time."""
