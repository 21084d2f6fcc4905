//! What the offline tests share: a queue on which everything in memory happens at once, and files
//! in memory by name.

use std::any::Any;
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use stillpoint_io::queue::Runtime;
use stillpoint_io::{Access, Error, Files, MemoryFile, Queue, Result, Storage};

#[derive(Debug)]
struct AtOnce;

impl Runtime for AtOnce {
    fn spawn(&self, _: LocalBoxFuture<'static, ()>) {
        unreachable!("offline tools spawn nothing")
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, _: Duration) -> LocalBoxFuture<'static, ()> {
        unreachable!("offline tools never sleep")
    }

    fn random(&self) -> u64 {
        4
    }

    fn driver(&self) -> &dyn Any {
        self
    }
}

/// A queue for operations in memory.
pub(super) fn queue() -> Queue {
    Queue::new(Rc::new(AtOnce))
}

/// The value of a future whose operations in memory all end at once.
pub(super) fn now<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("something waits in memory"),
    }
}

/// Files in memory by name.
#[derive(Debug, Default)]
pub(super) struct MemoryFiles(Mutex<BTreeMap<String, Arc<MemoryFile>>>);

impl MemoryFiles {
    /// The file called `name`.
    pub(super) fn file(&self, name: &str) -> Arc<MemoryFile> {
        self.0.lock().unwrap()[name].clone()
    }

    /// Puts a file there under its own name.
    pub(super) fn insert(&self, file: MemoryFile) -> Arc<MemoryFile> {
        let file = Arc::new(file);
        self.0.lock().unwrap().insert(file.name().to_owned(), file.clone());
        file
    }
}

impl Files for MemoryFiles {
    fn open<'a>(
        &'a self,
        _: &'a Queue,
        name: &'a str,
        _: Option<&'a str>,
        _: Access,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        async move {
            match self.0.lock().unwrap().get(name) {
                Some(file) => Ok(file.clone() as Arc<dyn Storage>),
                None => Err(Error::from_errno("open", 2).file(name)),
            }
        }
        .boxed_local()
    }

    fn create<'a>(
        &'a self,
        _: &'a Queue,
        name: &'a str,
    ) -> LocalBoxFuture<'a, Result<Arc<dyn Storage>>> {
        let prepared = self.0.lock().unwrap().get(name).cloned();
        let file = prepared.unwrap_or_else(|| self.insert(MemoryFile::new(name, 0)));
        async move { Ok(file as Arc<dyn Storage>) }.boxed_local()
    }
}
