"""Jobs that several tests ask about."""

from meshscope.plan.cluster import make_cluster
from meshscope.plan.model.known_models import find_model
from meshscope.plan.recipe import make_recipe
from meshscope.plan.timing.calibration import find_constants
from meshscope.plan.timing.pricing import Job


def make_job(model="llama-3-8b", device="H100-80GB", num_devices=64, stack="megatron", **cluster):
    return Job(
        model=find_model(model) if isinstance(model, str) else model,
        recipe=make_recipe(stack),
        cluster=make_cluster(device, num_devices, **cluster),
        constants=find_constants(stack, device),
    )
