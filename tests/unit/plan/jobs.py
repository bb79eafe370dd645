"""Jobs that several tests ask about."""

from meshscope.plan.calibration import find_constants
from meshscope.plan.cluster import make_cluster
from meshscope.plan.known_models import find_model
from meshscope.plan.pricing import Job
from meshscope.plan.recipe import make_recipe


def make_job(model="llama-3-8b", device="H100-80GB", num_devices=64, stack="megatron", **cluster):
    return Job(
        model=find_model(model) if isinstance(model, str) else model,
        recipe=make_recipe(stack),
        cluster=make_cluster(device, num_devices, **cluster),
        constants=find_constants(stack, device),
    )
