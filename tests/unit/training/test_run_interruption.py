import os
import signal
import threading

import pytest

from elias.errors import Interrupted
from elias.training.run import Interruption


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_outside_deferred_stops_at_once(number):
    with pytest.raises(Interrupted) as caught, Interruption().listening():
        send(number)

    assert caught.value.signal_number == number
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_inside_deferred_is_recorded():
    interruption = Interruption()

    with interruption.listening(), interruption.deferred():
        send(signal.SIGTERM)

    assert interruption.signal == signal.SIGTERM


def test_a_second_signal_stops_at_once():
    interruption = Interruption()

    with pytest.raises(Interrupted), interruption.listening(), interruption.deferred():
        send(signal.SIGINT, signal.SIGINT)


def test_signal_handlers_of_the_caller_are_kept():
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    with Interruption().listening():
        send(signal.SIGTERM)

    assert heard == [signal.SIGTERM]


def test_a_thread_other_than_the_main_one_can_train_too():
    def listen():
        with Interruption().listening():
            worked.append(True)

    worked = []
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()

    assert worked == [True]


def test_a_signal_that_numba_turns_into_a_system_error_stops_the_run():
    def load_compiled_code():
        try:
            send(signal.SIGTERM)
        except Interrupted as error:
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(Interrupted), Interruption().listening():
        load_compiled_code()
    with pytest.raises(SystemError), Interruption().listening():
        raise SystemError("not a signal")
