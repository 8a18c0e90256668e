"""Training and judging length models. The data are those of ``yardstick lenvm sample`` (:mod:`gateway.commands.lenvm`)."""
