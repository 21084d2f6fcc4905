//! The future of one submitted operation.
//!
//! A back end makes a pair with [`completion`], keeps the [`Promise`] (and the operation's memory,
//! R2) until the operation has ended, and hands the [`Completion`] out. Dropping the completion
//! cancels nothing: the operation goes on, and its memory stays owned by the back end.
//!
//! Both halves belong to one queue's thread. A back end whose work ends on another thread sends the
//! result home first.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::error::{Error, Kind, Result};
use crate::storage::Value;

enum State {
    Pending(Option<Waker>),
    Done(Result<Value>),
    Taken,
}

/// Ends an operation; see [`completion`].
pub struct Promise(Rc<RefCell<State>>);

/// Resolves when the operation has ended; see [`completion`].
#[must_use = "an operation's failure must reach somebody (R6)"]
pub struct Completion(Rc<RefCell<State>>);

/// A connected pair: what the promise is given, the completion resolves to.
pub fn completion() -> (Promise, Completion) {
    let state = Rc::new(RefCell::new(State::Pending(None)));
    (Promise(state.clone()), Completion(state))
}

impl Completion {
    /// An operation that has ended already.
    pub fn ready(result: Result<Value>) -> Completion {
        Completion(Rc::new(RefCell::new(State::Done(result))))
    }
}

impl Promise {
    /// Ends the operation with `result` and wakes whoever waits.
    pub fn fulfil(self, result: Result<Value>) {
        self.settle(result);
    }

    fn settle(&self, result: Result<Value>) {
        let mut state = self.0.borrow_mut();
        if let State::Pending(waker) = &mut *state {
            let waker = waker.take();
            *state = State::Done(result);
            drop(state);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

impl Drop for Promise {
    /// A back end that goes away ends its operations as cancelled, so that nobody waits for ever.
    fn drop(&mut self) {
        if matches!(&*self.0.borrow(), State::Pending(_)) {
            self.settle(Err(Error::new(
                Kind::Cancelled,
                "finish an operation",
                "the event loop has ended",
            )));
        }
    }
}

impl Future for Completion {
    type Output = Result<Value>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.0.borrow_mut();
        match &mut *state {
            State::Pending(waker) => {
                match waker {
                    Some(waker) => waker.clone_from(cx.waker()),
                    None => *waker = Some(cx.waker().clone()),
                }
                Poll::Pending
            }
            State::Done(_) => {
                let State::Done(result) = std::mem::replace(&mut *state, State::Taken) else {
                    unreachable!()
                };
                Poll::Ready(result)
            }
            State::Taken => panic!("a completion was polled after it had resolved"),
        }
    }
}
