"""How fast a board takes its link to be: from what was really sent and fetched, without latency."""

import pytest

from device_runtime.agent.link_speed import LinkRecord, LinkSpeed, TransferTimer

MEGABYTE = 1_000_000.0


def timed(*arrivals: tuple[int, float], began: float = 0.0) -> LinkSpeed | None:
    timer = TransferTimer(began)
    for size, moment in arrivals:
        timer.note(size, moment)
    return timer.speed()


def test_latency_is_no_part_of_a_speed():
    """450 kB a second behind an answer that takes two: the first chunk starts the clock."""
    speed = timed((90_000, 2.2), (90_000, 2.4), (90_000, 2.6))
    assert speed is not None
    assert speed.bytes_per_second == pytest.approx(450_000)
    assert speed.measured_bytes == 180_000


def test_a_single_chunk_counts_from_its_request():
    """There is nothing else to time."""
    assert timed((1_000, 0.5)) == LinkSpeed(2_000, 1_000)
    assert timed() is None
    assert timed((1_000, 0.0)) is None


def test_a_few_bytes_never_take_the_place_of_many():
    """680 bytes in 0.15 s made 4,500 bytes a second of a link with 450,000."""
    record = LinkRecord()
    record.note_download(LinkSpeed(450_000, 300_000))
    record.note_download(timed((680, 0.15)))
    assert record.sending_speed == 450_000
    record.note_download(LinkSpeed(90_000, 70_000))
    assert record.sending_speed == 90_000


def test_the_best_that_is_there_counts_where_a_model_is_small():
    """A model of 2 kB has no more to time."""
    record = LinkRecord()
    record.note_download(LinkSpeed(4_000, 680))
    record.note_download(LinkSpeed(9_000, 2_000))
    assert record.sending_speed == 9_000


def test_uploads_say_how_fast_a_board_sends():
    """A tenth of the download; where the link is another one, this round's download says it."""
    record = LinkRecord()
    record.note_download(LinkSpeed(MEGABYTE, 200_000))
    assert record.sending_speed == MEGABYTE
    record.note_upload(LinkSpeed(MEGABYTE / 10, 200_000))
    assert record.sending_speed == MEGABYTE / 10
    record.note_download(LinkSpeed(0.8 * MEGABYTE, 200_000))
    assert record.sending_speed == MEGABYTE / 10
    record.note_upload(LinkSpeed(1.0, 680))
    assert record.sending_speed == MEGABYTE / 10
    record.note_download(LinkSpeed(MEGABYTE / 40, 200_000))
    assert record.sending_speed == MEGABYTE / 40


def test_an_upload_is_forgotten_that_nothing_confirms():
    """A stall during one upload made the board narrow, and a narrow update never corrects it."""
    record = LinkRecord()
    record.note_download(LinkSpeed(MEGABYTE, 200_000))
    record.note_upload(LinkSpeed(1_000.0, 200_000))
    speeds = []
    for _ in range(4):
        record.note_download(LinkSpeed(MEGABYTE, 200_000))
        record.note_upload(LinkSpeed(1.0, 680))
        speeds.append(record.sending_speed)
    assert speeds == [1_000.0, 1_000.0, 1_000.0, MEGABYTE]


def test_an_upload_alone_is_better_than_nothing():
    """As after a restart of the agent in the middle of an upload."""
    record = LinkRecord()
    record.note_upload(LinkSpeed(5.0, 100))
    assert record.sending_speed == 5.0
