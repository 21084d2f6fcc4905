//! `stillpoint bench`: a simple run of equal requests, as `qemu-img bench` does it.
//!
//! The engine runs in this process, without a server before it. Options, defaults and the lines on
//! standard output are qemu-img's; `--output json`, `--alloc` and `--grow` are our own.
//!
//! Deliberately absent: random offsets, mixed loads, latencies; fio on a served disk has them.

use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use stillpoint_engine::{Disk, ImageFormat, Options};
use stillpoint_host::{Aio, Cache, HostFiles, LoopOptions, Reach, run as run_loop, spawn_thread};
use stillpoint_io::{Access, Background, Durability, Error, Files, Kind, Queue, Result, Segments};
use stillpoint_serve::slots::Slots;

use crate::Tool;
use crate::options::{AIOS, AllocationOptions, CACHES, FORMATS, Size, choose};

const EXAMPLES: &str = "\
Examples:
  Read 75,000 times 4 KiB from the beginning, 64 at once:
    stillpoint bench disk.qcow2

  Write 4 KiB into each of 10,000 new clusters, 32 at once, past the page cache:
    stillpoint bench -w -c 10000 -d 32 -S 64k -t none -i io_uring disk.qcow2

Requests beyond the end of the disk begin again at its start.";

/// Measure an image with equal requests (qemu-img bench)
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES, args_override_self = true)]
pub struct BenchArgs {
    /// The image's file
    #[arg(value_name = "IMAGE")]
    image: PathBuf,

    /// How many requests
    #[arg(short, long, default_value_t = 75_000, value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    count: u32,

    /// How many requests at once
    #[arg(short, long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    depth: u32,

    /// How many bytes each request has
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4096")]
    buffer_size: Size,

    /// How far each request begins behind the one before [default: the buffer's size]
    #[arg(short = 'S', long, value_name = "SIZE")]
    step_size: Option<Size>,

    /// Where the first request begins
    #[arg(short, long, value_name = "SIZE", default_value = "0")]
    offset: Size,

    /// Write instead of read
    #[arg(short, long)]
    write: bool,

    /// The byte that is written
    #[arg(long, value_name = "BYTE", default_value_t = 0)]
    pattern: u8,

    /// Flush whenever this many requests have been sent; waits for them first
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    flush_interval: u32,

    /// Flush without waiting for the requests
    #[arg(long)]
    no_drain: bool,

    /// The image's format [default: probed]
    #[arg(short, long, value_parser = choose(FORMATS))]
    format: Option<ImageFormat>,

    /// What stands between a write and the disk
    #[arg(short = 't', long, default_value = "writeback", value_parser = choose(CACHES))]
    cache: Cache,

    /// By which interface the image is read and written
    #[arg(short = 'i', long, default_value = "threads", value_parser = choose(AIOS))]
    aio: Aio,

    /// The same as -i native
    #[arg(short, long)]
    native: bool,

    /// Read although another program may write to the image
    #[arg(short = 'U', long)]
    force_share: bool,

    /// Accepted for qemu-img's sake
    #[arg(short, long)]
    quiet: bool,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t = Output::Human)]
    output: Output,

    #[command(flatten)]
    allocation: AllocationOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// qemu-img's lines
    Human,
    /// One JSON object
    Json,
}

/// What is run, with everything resolved.
#[derive(Clone, Debug)]
struct Load {
    write: bool,
    count: u64,
    depth: usize,
    length: usize,
    step: u64,
    offset: u64,
    pattern: u8,
    flush_interval: u64,
    drain: bool,
}

impl BenchArgs {
    fn load(&self) -> Result<Load> {
        let refuse = |why: &str| Err(Error::new(Kind::Invalid, "run the bench", why));
        let Size(length) = self.buffer_size;
        if length == 0 || length > i32::MAX as u64 {
            return refuse("the buffer size must lie between 1 and 2147483647");
        }
        if self.offset.0 > i64::MAX as u64 {
            return refuse("the offset must lie between 0 and 9223372036854775807");
        }
        if self.flush_interval > 0 && !self.write {
            return refuse("--flush-interval is for write tests only");
        }
        if self.flush_interval > 0 && !self.no_drain && self.flush_interval < self.depth {
            return refuse("the flush interval must not be smaller than the depth");
        }
        Ok(Load {
            write: self.write,
            count: self.count.into(),
            depth: self.depth as usize,
            length: length as usize,
            step: self.step_size.map_or(length, |Size(step)| if step == 0 { length } else { step }),
            offset: self.offset.0,
            pattern: self.pattern,
            flush_interval: self.flush_interval.into(),
            drain: !self.no_drain,
        })
    }

    fn engine(&self) -> Options {
        let mut options = Options {
            format: self.format,
            // Reading does no harm to what is not raw after all.
            allow_probed_raw: !self.write,
            access: match (self.write, self.force_share) {
                (true, _) => Access::Write,
                (false, true) => Access::ReadUnlocked,
                (false, false) => Access::Read,
            },
            ..Options::default()
        };
        self.allocation.apply(&mut options);
        options
    }
}

/// Runs the bench and prints its result.
pub fn run(args: &BenchArgs, _tool: Tool) -> Result<u8> {
    let load = args.load()?;
    let aio = if args.native { Aio::Native } else { args.aio };
    let direct = matches!(args.cache, Cache::None | Cache::DirectSync);
    if aio == Aio::Native && !direct {
        let error = Error::new(Kind::Invalid, "use aio=native", "it needs direct I/O");
        return Err(error.remedy("add -t none"));
    }
    let path = args.image.to_string_lossy().into_owned();
    let options = LoopOptions { aio, depth: args.depth };
    let background = Arc::new(spawn_thread("background", options)?);
    let time = run_loop(options, async |queue| {
        let files: Arc<dyn Files> =
            Arc::new(HostFiles::new(aio, args.cache).reaching(Reach::Anywhere));
        let background: Arc<dyn Background> = background.clone();
        let disk = Disk::open(&queue, &files, &background, &path, args.engine()).await?;
        if args.output == Output::Human {
            announce(&load);
        }
        let time = measure(&queue, &disk, &load).await.map_err(|error| error.file(&path));
        let closed = disk.close(&queue).await;
        let time = time?;
        closed.map(|()| time)
    })??;
    report(args.output, &load, time);
    Ok(0)
}

fn announce(load: &Load) {
    outln!(
        "Sending {} {} requests, {} bytes each, {} in parallel (starting at offset {}, step size {})",
        load.count,
        if load.write { "write" } else { "read" },
        load.length,
        load.depth,
        load.offset,
        load.step,
    );
    if load.flush_interval > 0 {
        let drained = if load.drain { "" } else { "undrained " };
        outln!("Sending flush every {} {drained}requests", load.flush_interval);
    }
}

fn report(output: Output, load: &Load, time: Duration) {
    let seconds = time.as_secs_f64();
    match output {
        Output::Human => outln!("Run completed in {seconds:.3} seconds."),
        Output::Json => {
            let bytes = load.count * load.length as u64;
            let result = serde_json::json!({
                "operation": if load.write { "write" } else { "read" },
                "count": load.count,
                "buffer-size": load.length,
                "step-size": load.step,
                "offset": load.offset,
                "depth": load.depth,
                "flush-interval": load.flush_interval,
                "seconds": seconds,
                "requests-per-second": load.count as f64 / seconds,
                "bytes-per-second": bytes as f64 / seconds,
            });
            outln!("{result:#}");
        }
    }
}

/// One request of the bench.
#[derive(Clone, Copy)]
enum Step {
    Transfer(u64),
    Flush,
}

/// Runs the whole load; how long it took.
async fn measure(queue: &Queue, disk: &Disk, load: &Load) -> Result<Duration> {
    let pattern = Segments::alloc(if load.write { load.length } else { 0 });
    pattern.fill(load.pattern);
    let one = async |step: Step| match step {
        Step::Transfer(offset) if load.write => {
            disk.write(queue, offset, pattern.clone(), Durability::Volatile).await
        }
        Step::Transfer(offset) => disk.read(queue, offset, Segments::alloc(load.length)).await,
        Step::Flush => Box::pin(disk.flush(queue)).await,
    };
    let mut slots = Slots::new(load.depth + 1);
    let mut plan = Plan::new(load, disk.size());
    let mut failed = None;
    let begin = Instant::now();
    poll_fn(|cx| {
        let mut take = |result: Result<()>| {
            if let Err(error) = result {
                failed.get_or_insert(error);
            }
        };
        slots.poll(cx, &mut take);
        while failed.is_none()
            && let Some(step) = plan.next(slots.len())
        {
            if let Some(result) = slots.start(one(step)) {
                failed = failed.take().or(result.err());
            }
        }
        match slots.is_empty() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    failed.map_or(Ok(begin.elapsed()), Err)
}

/// Which request comes next.
struct Plan<'a> {
    load: &'a Load,
    disk_bytes: u64,
    left: u64,
    offset: u64,
    /// A flush is due; with `drain` it waits for what is in flight, and what follows waits for it.
    flush_due: bool,
    flushing: bool,
}

impl<'a> Plan<'a> {
    fn new(load: &'a Load, disk_bytes: u64) -> Plan<'a> {
        Plan {
            load,
            disk_bytes,
            left: load.count,
            offset: load.offset,
            flush_due: false,
            flushing: false,
        }
    }

    /// The next request that may start while `in_flight` are running.
    fn next(&mut self, in_flight: usize) -> Option<Step> {
        let Load { depth, step, flush_interval, drain, .. } = *self.load;
        if self.flush_due {
            if drain && in_flight > 0 {
                return None;
            }
            self.flush_due = false;
            self.flushing = drain;
            return Some(Step::Flush);
        }
        if self.flushing {
            if in_flight > 0 {
                return None;
            }
            self.flushing = false;
        }
        if self.left == 0 || in_flight >= depth {
            return None;
        }
        let offset = self.offset;
        self.offset += step;
        if self.offset >= self.disk_bytes {
            self.offset = self.offset.checked_rem(self.disk_bytes).unwrap_or(0);
        }
        self.left -= 1;
        self.flush_due = flush_interval > 0 && self.left.is_multiple_of(flush_interval);
        Some(Step::Transfer(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(count: u64, depth: usize, flush_interval: u64, drain: bool) -> Load {
        let (length, step) = (4096, 4096);
        let (write, offset, pattern) = (true, 0, 0);
        Load { write, count, depth, length, step, offset, pattern, flush_interval, drain }
    }

    /// The steps as text: `w` and `f` for started requests, `.` where all that runs has ended.
    fn steps(load: &Load) -> String {
        let mut plan = Plan::new(load, 1 << 20);
        let (mut text, mut in_flight) = (String::new(), 0);
        loop {
            match plan.next(in_flight) {
                Some(Step::Transfer(_)) => text.push('w'),
                Some(Step::Flush) => text.push('f'),
                None if in_flight == 0 => return text,
                None => {
                    text.push('.');
                    in_flight = 0;
                    continue;
                }
            }
            in_flight += 1;
        }
    }

    #[test]
    fn requests_run_at_depth_and_flushes_come_between() {
        assert_eq!(steps(&load(5, 2, 0, true)), "ww.ww.w.");
        assert_eq!(steps(&load(5, 2, 2, true)), "w.f.ww.f.ww.f.");
        assert_eq!(steps(&load(4, 2, 2, false)), "wwf.wwf.");
    }

    #[test]
    fn offsets_begin_again_at_the_end() {
        let load = Load { offset: (1 << 20) - 4096, step: 8192, ..load(3, 3, 0, true) };
        let mut plan = Plan::new(&load, 1 << 20);
        let offsets: Vec<u64> = std::iter::from_fn(|| match plan.next(0) {
            Some(Step::Transfer(offset)) => Some(offset),
            _ => None,
        })
        .collect();
        assert_eq!(offsets, [(1 << 20) - 4096, 4096, 12288]);
    }
}
