"""Scalars and alarms in an event file that TensorBoard reads, by its own writer."""

from typing import Any

from meshscope.alarms.sample import Sample
from meshscope.alarms.sinks.background import Background
from meshscope.alarms.sinks.log import describe_event
from meshscope.report.alarm_event import AlarmEvent


class TensorboardSink:
    name = "tensorboard"

    def __init__(self, folder: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._text_metadata = create_summary_metadata(display_name="alarms", description="")
        self._writer: Any = EventFileWriter(folder, flush_secs=10)
        self._background = Background(self.name)
        self._step = -1

    def tell(self, event: AlarmEvent) -> None:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        text = TensorProto(
            dtype=DT_STRING, tensor_shape=shape, string_val=[describe_event(event).encode()]
        )
        value = self._summary.Value(
            tag="meshscope/alarms_text", metadata=self._text_metadata, tensor=text
        )
        self._add([value], event.step, event.told_unix_ns)

    def measure(self, sample: Sample) -> None:
        if sample.step is None or sample.step == self._step:
            return
        self._step = sample.step
        values = [
            self._summary.Value(tag=f"meshscope/{name}", simple_value=value)
            for name, value in sample.values()
        ]
        self._add(values, sample.step, sample.unix_ns)

    def _add(self, values: list[Any], step: int | None, unix_ns: int) -> None:
        event = self._event(
            step=step or 0, wall_time=unix_ns / 1e9, summary=self._summary(value=values)
        )
        self._background.run(lambda: self._writer.add_event(event))

    def problems(self) -> list[str]:
        return self._background.problems()

    def close(self) -> None:
        self._background.run(self._writer.close)
        self._background.close()
