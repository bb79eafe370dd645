"""What the other checks rest on: the servers of this folder answer."""

import fsspec

from conftest import fetch_text


def test_the_object_store_keeps_what_it_is_given(bucket, s3):
    with fsspec.open(f"{bucket}/folder/name", "wb") as file:
        file.write(b"bytes")
    with fsspec.open(f"{bucket}/folder/name", "rb") as file:
        assert file.read() == b"bytes"
    assert "ListAllMyBucketsResult" in fetch_text(s3)


def test_ray_runs_a_task(ray_head):
    import ray

    ray.init(address=ray_head, log_to_driver=False)
    try:
        assert ray.get(ray.remote(lambda a, b: a**b).remote(2, 10), timeout=60) == 1024
        assert ray.cluster_resources()["CPU"] == 2
    finally:
        ray.shutdown()


def test_dask_has_two_workers_and_runs_a_task(dask_scheduler):
    from distributed import Client

    with Client(dask_scheduler, timeout=60) as client:
        client.wait_for_workers(2, timeout=60)
        assert client.submit(pow, 2, 10).result(timeout=60) == 1024
