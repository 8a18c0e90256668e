"""A model that thinks before it answers, and measurements of thinking that is steered or cut off."""
