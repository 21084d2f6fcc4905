//! One client: negotiation, then transmission, then an orderly end.
//!
//! A connection is one task. Inside it three futures are polled in turn: the *reader* takes requests
//! from the socket and starts them in [`Slots`]; the *writer* polls those that woke and sends what
//! they answered; the *guard* ends a connection that the server must not wait for.
//!
//! ```text
//!   socket ─▶ Inbox ─▶ reader ─ check, grant, payload ─▶ Slots ─ request::run ─▶ Disk
//!   socket ◀─ writer ◀─ Outbox ◀────────────── Answer ◀────┘
//! ```
//!
//! - The reader pauses, and so does the client in the end, when the slots are taken, when replies
//!   stay unsent, or when the server's [`Budget`] is used up. It never holds memory for a request
//!   that it does not read.
//! - Requests that were started always run to their end (R1, R2): whatever ends the connection, the
//!   writer stays until the last slot is empty, and drops the answers that nobody takes any more.
//! - Because reader and writer share a task, whatever the writer finishes lets the reader look
//!   again; no waker is kept for that.
//!
//! Deliberately absent: TLS, and decisions about requests (`request`).

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::{Either, select};
use smallvec::SmallVec;
use stillpoint_host::{Part, Stream};
use stillpoint_io::{Error, Kind, Queue, Result, Segments};

use super::budget::{Budget, Grant};
use super::codec::{PAYLOAD_BYTES_MAX, Request, command};
use super::export::Exports;
use super::handshake::{Agreement, Handshake, ReplyStyle, Step};
use super::inbox::{Failed, Inbox};
use super::outbox::{Answer, Outbox};
use super::request::{self, Target};
use crate::slots::Slots;
use crate::stop::Stop;

/// What a server allows its clients.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// How many requests one client may have in flight.
    pub in_flight_max: usize,
    /// How long a negotiation may take.
    pub handshake_time: Duration,
    /// How long a client may keep others waiting for memory that it holds without moving a byte.
    pub stall_time: Duration,
    /// How long a client may take to fetch its last replies when the connection ends.
    pub farewell_time: Duration,
}

impl Default for Allowance {
    fn default() -> Allowance {
        Allowance {
            in_flight_max: 256,
            handshake_time: Duration::from_secs(10),
            stall_time: Duration::from_secs(30),
            farewell_time: Duration::from_secs(10),
        }
    }
}

/// The longest unwanted payload that is skipped, in bytes; behind a longer one the client is cut off.
const SKIP_BYTES_MAX: u64 = 2 * PAYLOAD_BYTES_MAX as u64;

/// How much is received before the loop gets a turn, in bytes.
const TURN_BYTES_MAX: usize = 512 << 10;
/// How many parts of one batch of replies are listed without an allocation.
const PARTS_INLINE: usize = 64;

/// What all connections of a server share.
#[derive(Clone, Debug)]
pub struct Hall {
    /// What is served.
    pub exports: Arc<Exports>,
    /// The memory of all requests.
    pub budget: Arc<Budget>,
    /// What each client is allowed.
    pub allowance: Allowance,
    /// Ends all connections.
    pub stop: Stop,
}

/// Why a connection ended without anything having gone wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The client said good-bye, or closed its side between two requests.
    Disconnected,
    /// The server stops.
    Stopped,
}

/// Serves one client until it goes, is put out, or the server stops. Whatever it returns, no request
/// of the client is in flight any more.
///
/// # Errors
/// What the client did wrong, or what the host refused.
pub async fn serve(queue: &Queue, stream: &Stream, hall: &Hall) -> Result<End> {
    let mut inbox = Inbox::new();
    let agreement = {
        let negotiation = pin!(negotiate(queue, stream, hall, &mut inbox));
        let time = pin!(queue.sleep(hall.allowance.handshake_time));
        let stop = pin!(hall.stop.heard());
        match select(negotiation, select(time, stop)).await {
            Either::Left((agreement, _)) => agreement?,
            Either::Right((Either::Left(_), _)) => {
                return Err(refuse("it did not finish its negotiation in time"));
            }
            Either::Right((Either::Right(_), _)) => return Ok(End::Stopped),
        }
    };
    match agreement {
        Some(agreement) => transmit(queue, stream, hall, inbox, agreement).await,
        None => Ok(End::Disconnected),
    }
}

fn refuse(why: impl Into<String>) -> Error {
    Error::new(Kind::Invalid, "go on with the client", why)
}

async fn negotiate(
    queue: &Queue,
    stream: &Stream,
    hall: &Hall,
    inbox: &mut Inbox,
) -> Result<Option<Agreement>> {
    let catalog = hall.exports.catalog();
    let mut output = Vec::new();
    let mut handshake = Handshake::begin(&mut output);
    loop {
        // Sent before the next step: a client that does not read gets no second answer.
        stream.write_all(queue, &[Part::Bytes(&output)]).await?;
        output.clear();
        let (consumed, step) = handshake.step(catalog, inbox.buffered(), &mut output);
        inbox.consume(consumed);
        match step {
            Step::Again => {}
            Step::NeedMore => match inbox.fill(queue, stream).await {
                Ok(_) => {}
                Err(Failed::Ended) => return Ok(None),
                Err(Failed::Lost(error)) => return Err(error),
            },
            Step::Ready(agreement) => {
                stream.write_all(queue, &[Part::Bytes(&output)]).await?;
                return Ok(Some(agreement));
            }
            Step::Close(why) => {
                stream.write_all(queue, &[Part::Bytes(&output)]).await?;
                return why.map_or(Ok(None), |why| Err(refuse(why)));
            }
        }
    }
}

async fn transmit(
    queue: &Queue,
    stream: &Stream,
    hall: &Hall,
    mut inbox: Inbox,
    agreement: Agreement,
) -> Result<End> {
    let Agreement { export, style, contexts } = agreement;
    let target = Rc::new(Target {
        queue: queue.clone(),
        disk: hall.exports.disk(export).clone(),
        listing: hall.exports.catalog().listings()[export].clone(),
        style,
        contexts,
    });
    let flow = Flow::new(style, hall.allowance.in_flight_max);
    let start = |request, payload, grant| {
        flow.start(execute(target.clone(), request, payload, grant));
    };
    let mut end = Ok(End::Disconnected);
    let mut reader =
        pin!(Some(flow.read_requests(&target, stream, &hall.budget, &mut inbox, start)));
    let mut writer = pin!(flow.write_replies(queue, stream));
    let mut guard = pin!(flow.guard(queue, hall));
    let mut farewell = pin!(queue.sleep(Duration::ZERO));
    poll_fn(|cx| {
        flow.turn_bytes.set(0);
        // Replies first: they set the client to work again while its next requests are read.
        if writer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        if let Some(reading) = reader.as_mut().as_pin_mut() {
            let ended = match reading.poll(cx) {
                Poll::Pending if flow.broken.get() => Poll::Ready(Ok(End::Disconnected)),
                Poll::Pending => guard.as_mut().poll(cx),
                ended => ended,
            };
            if let Poll::Ready(ended) = ended {
                end = ended;
                reader.set(None);
                flow.closing.set(true);
                farewell.set(queue.sleep(hall.allowance.farewell_time));
            }
        }
        if flow.closing.get() && farewell.as_mut().poll(cx).is_ready() {
            flow.broken.set(true);
        }
        // What was answered at once goes out at once.
        let written = writer.as_mut().poll(cx);
        if flow.crowded.get() && flow.has_room() {
            // It made room after the reader had looked.
            cx.waker().wake_by_ref();
        }
        written
    })
    .await;
    end
}

async fn execute(target: Rc<Target>, request: Request, payload: Segments, grant: Grant) -> Answer {
    let result = request::run(&target, request, payload).await;
    Answer { request, result, grant: Some(grant) }
}

/// A connection in its transmission phase: what reader, writer and guard share.
struct Flow<F: Future<Output = Answer>> {
    style: ReplyStyle,
    in_flight_max: usize,
    slots: RefCell<Slots<F>>,
    outbox: RefCell<Outbox>,
    /// How many replies are being sent.
    sending: Cell<usize>,
    /// The reader has ended: once the slots and the outbox are empty, all is done.
    closing: Cell<bool>,
    /// Nobody takes replies any more.
    broken: Cell<bool>,
    /// Counts up whenever the client has sent or taken something.
    moves: Cell<u64>,
    /// How many bytes were received since the task was last polled.
    turn_bytes: Cell<usize>,
    /// The reader waits for the client to send a payload that it has announced.
    receiving: Cell<bool>,
    /// The reader waits for room.
    crowded: Cell<bool>,
}

impl<F: Future<Output = Answer>> Flow<F> {
    fn new(style: ReplyStyle, in_flight_max: usize) -> Flow<F> {
        let in_flight_max = in_flight_max.max(1);
        Flow {
            style,
            in_flight_max,
            slots: RefCell::new(Slots::new(in_flight_max)),
            outbox: RefCell::default(),
            sending: Cell::new(0),
            closing: Cell::new(false),
            broken: Cell::new(false),
            moves: Cell::new(0),
            turn_bytes: Cell::new(0),
            receiving: Cell::new(false),
            crowded: Cell::new(false),
        }
    }

    fn moved(&self, bytes: usize) {
        self.moves.set(self.moves.get() + 1);
        self.turn_bytes.set(self.turn_bytes.get() + bytes);
    }

    /// Takes requests from the socket until the client says good-bye.
    async fn read_requests(
        &self,
        target: &Target,
        stream: &Stream,
        budget: &Arc<Budget>,
        inbox: &mut Inbox,
        start: impl Fn(Request, Segments, Grant),
    ) -> Result<End> {
        let Target { queue, listing, style, contexts, .. } = target;
        loop {
            let Some(request) = next_request(inbox, *style)? else {
                match inbox.fill(queue, stream).await {
                    Ok(count) => self.moved(count),
                    Err(Failed::Ended) if inbox.buffered().is_empty() => {
                        return Ok(End::Disconnected);
                    }
                    Err(Failed::Ended) => {
                        return Err(refuse("it hung up in the middle of a request"));
                    }
                    Err(Failed::Lost(error)) => return Err(error),
                }
                continue;
            };
            if request.command == command::DISC {
                return Ok(End::Disconnected);
            }
            self.breathe().await;
            self.room().await;
            let payload_bytes = request::payload_bytes(&request, *style);
            if let Err(failure) = request::check(&request, listing, *style, *contexts) {
                if payload_bytes > SKIP_BYTES_MAX {
                    return Err(refuse(format!("it announced a payload of {payload_bytes} bytes")));
                }
                inbox.skip(queue, stream, payload_bytes, |bytes| self.moved(bytes)).await?;
                tracing::debug!(export = listing.name, ?request, failure.message, "refused");
                self.answer(Answer { request, result: Err(failure), grant: None });
                continue;
            }
            let grant = budget.take(request::memory_bytes(&request)).await;
            let payload = Segments::alloc(payload_bytes as usize);
            self.receiving.set(true);
            inbox.take_payload(queue, stream, &payload, |bytes| self.moved(bytes)).await?;
            self.receiving.set(false);
            start(request, payload, grant);
        }
    }

    /// Whether one more request may be in flight.
    fn has_room(&self) -> bool {
        let unsent = self.sending.get() + self.outbox.borrow().reply_count();
        self.slots.borrow().len() + unsent < self.in_flight_max
    }

    /// Waits until one more request may be in flight. The writer, which makes room, shares the task:
    /// whoever polls them both looks after it again.
    async fn room(&self) {
        poll_fn(|_| {
            self.crowded.set(!self.has_room());
            if self.crowded.get() { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
    }

    /// Pauses for one turn of the loop after much has been received at once, so that what was
    /// started so far reaches the disk.
    async fn breathe(&self) {
        poll_fn(|cx| {
            if self.turn_bytes.get() < TURN_BYTES_MAX {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    fn start(&self, request: F) {
        let ended = self.slots.borrow_mut().start(request);
        if let Some(answer) = ended {
            self.answer(answer);
        }
    }

    fn answer(&self, answer: Answer) {
        if !self.broken.get() {
            self.outbox.borrow_mut().push(self.style, answer);
        }
    }

    fn poll_requests(&self, cx: &mut Context<'_>) {
        self.slots.borrow_mut().poll(cx, |answer| self.answer(answer));
    }

    /// Polls requests and sends their answers, until the reader has ended and nothing is left.
    async fn write_replies(&self, queue: &Queue, stream: &Stream) {
        let mut sending = Outbox::default();
        loop {
            let more = poll_fn(|cx| {
                self.poll_requests(cx);
                if !self.outbox.borrow().is_empty() {
                    return Poll::Ready(true);
                }
                match self.closing.get() && self.slots.borrow().is_empty() {
                    true => Poll::Ready(false),
                    false => Poll::Pending,
                }
            });
            if !more.await {
                return;
            }
            std::mem::swap(&mut sending, &mut self.outbox.borrow_mut());
            self.sending.set(sending.reply_count());
            {
                let parts: SmallVec<[Part<'_>; PARTS_INLINE]> = sending.parts().collect();
                let mut send = pin!(stream.write_all(queue, &parts));
                // Requests go on while a slow client takes its replies: others may wait for them.
                let sent = poll_fn(|cx| {
                    match send.as_mut().poll(cx) {
                        Poll::Pending if self.broken.get() => {}
                        Poll::Pending => {
                            self.poll_requests(cx);
                            return Poll::Pending;
                        }
                        Poll::Ready(Ok(())) => return Poll::Ready(true),
                        Poll::Ready(Err(error)) => tracing::debug!("a client went away: {error}"),
                    }
                    Poll::Ready(false)
                });
                if !sent.await {
                    self.broken.set(true);
                    self.outbox.borrow_mut().clear();
                }
            }
            self.moved(0);
            sending.clear();
            self.sending.set(0);
        }
    }

    /// Ends when the connection must: the server stops, or the client holds memory that others wait
    /// for and has moved no byte for too long.
    async fn guard(&self, queue: &Queue, hall: &Hall) -> Result<End> {
        let mut moves = self.moves.get();
        loop {
            let time = pin!(queue.sleep(hall.allowance.stall_time));
            let stop = pin!(hall.stop.heard());
            if let Either::Right(_) = select(time, stop).await {
                return Ok(End::Stopped);
            }
            let holds = self.receiving.get() || self.sending.get() > 0;
            if holds && self.moves.get() == moves && hall.budget.is_short() {
                self.broken.set(true);
                return Err(refuse("it holds memory that others wait for, and moves nothing"));
            }
            moves = self.moves.get();
        }
    }
}

/// Decodes the next header, if it has been received.
fn next_request(inbox: &mut Inbox, style: ReplyStyle) -> Result<Option<Request>> {
    let (bytes, request) = if style == ReplyStyle::Extended {
        let Some(head) = inbox.buffered().first_chunk() else { return Ok(None) };
        (Request::EXTENDED_BYTES, Request::decode_extended(head))
    } else {
        let Some(head) = inbox.buffered().first_chunk() else { return Ok(None) };
        (Request::COMPACT_BYTES, Request::decode_compact(head))
    };
    inbox.consume(bytes);
    request.map(Some).ok_or_else(|| refuse("a request does not begin with its magic number"))
}
