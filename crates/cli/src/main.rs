//! The `stillpoint` program: qemu-img's verbs, a server, a demonstration.
//!
//! It takes what was typed, resolves it, runs it and prints; it decides nothing about disks.
//!
//! | file | what it holds |
//! |---|---|
//! | `options` | what can be chosen for an image, each choice defined once |
//! | `serve`, `config` | `stillpoint serve`, and its configuration files |
//! | `demo` | `stillpoint demo` |
//! | `bench` | `stillpoint bench`, as `qemu-img bench` |
//! | `output` | printing that outlives its reader |
//! | `img/` | `create`, `info`, `check`, `map`, as qemu-img's |
//!
//! A verb is one line in [`Verb`], one in [`Verb::run`], and a file. Called through a link named
//! `qemu-img`, or as `stillpoint img VERB`, the program speaks as qemu-img does: see [`Tool`].
//!
//! Exit codes: 0 done, 1 failed or wrongly called, as for qemu-img; verbs may have more of their own.

#![allow(unreachable_pub, reason = "in a program, pub means: for its other modules")]

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use stillpoint_io::Result;
use tracing_subscriber::EnvFilter;

#[macro_use]
mod output;
mod bench;
mod config;
mod demo;
mod img;
mod options;
mod serve;

/// A disk engine for virtual machines
///
/// Stillpoint keeps a virtual machine's disk in an ordinary file (qcow2 or raw), serves it to any
/// hypervisor, never loses what the guest was told is safe, and is as fast as the file beneath it.
///
/// Begin with `stillpoint demo`: it needs no root, no packages and no arguments.
#[derive(Parser)]
#[command(name = "stillpoint", version, max_term_width = 100)]
struct Cli {
    /// What is logged to standard error: error, warn, info, debug, trace, or a filter like
    /// stillpoint_serve=debug,warn [default: info for serve, warn for other verbs]
    #[arg(long, global = true, value_name = "LEVEL", help_heading = "Logging")]
    log: Option<String>,

    /// How it is logged
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text, help_heading = "Logging")]
    log_format: LogFormat,

    #[command(subcommand)]
    verb: Verb,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// One line for people
    Text,
    /// One JSON object a line
    Json,
}

/// What can be done; one line each.
#[derive(Subcommand)]
enum Verb {
    Serve(Box<serve::ServeArgs>),
    Demo(demo::DemoArgs),
    Bench(bench::BenchArgs),
    Create(img::create::CreateArgs),
    Info(img::info::InfoArgs),
    Check(img::check::CheckArgs),
    Map(img::map::MapArgs),
}

impl Verb {
    /// Does it; returns the exit code.
    fn run(self, tool: Tool, configured: Vec<serve::ImageSpec>) -> Result<u8> {
        match self {
            Verb::Serve(args) => serve::run(*args, configured),
            Verb::Demo(args) => demo::run(&args),
            Verb::Bench(args) => bench::run(&args, tool),
            Verb::Create(args) => img::create::run(&args, tool),
            Verb::Info(args) => img::info::run(&args, tool),
            Verb::Check(args) => img::check::run(&args, tool),
            Verb::Map(args) => img::map::run(&args, tool),
        }
    }
}

/// As whom the program was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    Stillpoint,
    QemuImg,
}

impl Tool {
    /// Takes the words that name the tool off `args`, so that a verb stands first behind the name.
    fn take(args: &mut Vec<OsString>) -> Tool {
        let called = args.first().and_then(|name| Path::new(name).file_name());
        if called.is_some_and(|name| name == "qemu-img") {
            return Tool::QemuImg;
        }
        if args.get(1).is_some_and(|word| word == "img") {
            args.remove(1);
            return Tool::QemuImg;
        }
        Tool::Stillpoint
    }

    fn name(self) -> &'static str {
        match self {
            Tool::Stillpoint => "stillpoint",
            Tool::QemuImg => "qemu-img",
        }
    }
}

fn main() -> ExitCode {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    let tool = Tool::take(&mut args);
    let code = match understand(&args) {
        Ok(Ok((cli, configured))) => {
            start_logging(&cli);
            cli.verb.run(tool, configured).unwrap_or_else(|error| complain(tool, &error))
        }
        Ok(Err(error)) => complain(tool, &error),
        Err(usage) => {
            // Help and version were asked for, and are no mistake.
            let code = u8::from(usage.use_stderr());
            let _ = usage.print();
            code
        }
    };
    ExitCode::from(code.max(u8::from(output::failed())))
}

fn complain(tool: Tool, error: &stillpoint_io::Error) -> u8 {
    errln!("{}: {error}", tool.name());
    1
}

type Understood = (Cli, Vec<serve::ImageSpec>);

/// Resolves what was typed. A configuration file's flags stand before the typed ones, which override
/// them.
fn understand(args: &[OsString]) -> Result<Result<Understood>, clap::Error> {
    let cli = Cli::try_parse_from(args)?;
    let Verb::Serve(serve) = &cli.verb else { return Ok(Ok((cli, Vec::new()))) };
    let Some(path) = serve.config() else { return Ok(Ok((cli, Vec::new()))) };
    let config = match config::read(path) {
        Ok(config) => config,
        Err(error) => return Ok(Err(error)),
    };
    let verb = args.iter().position(|arg| arg == "serve").expect("it was parsed");
    let (before, behind) = args.split_at(verb + 1);
    let flags: Vec<OsString> = config.flags.into_iter().map(OsString::from).collect();
    let cli = Cli::try_parse_from([before, &flags, behind].concat())?;
    Ok(Ok((cli, config.images)))
}

fn start_logging(cli: &Cli) {
    let usual = if matches!(cli.verb, Verb::Serve(_)) { "info" } else { "warn" };
    let wanted = cli.log.as_deref().unwrap_or(usual);
    let filter = EnvFilter::try_new(wanted).unwrap_or_else(|error| {
        errln!("stillpoint: --log {wanted}: {error}; logging {usual}");
        EnvFilter::new(usual)
    });
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // What cannot be logged is lost; complaining about it would end the server.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal());
    match cli.log_format {
        LogFormat::Text => builder.with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_tool_follows_from_the_name_or_the_first_word() {
        for (words, tool, left) in [
            (&["stillpoint", "serve"][..], Tool::Stillpoint, 2),
            (&["/usr/bin/qemu-img", "bench", "x"], Tool::QemuImg, 3),
            (&["stillpoint", "img", "bench", "x"], Tool::QemuImg, 3),
            (&["stillpoint"], Tool::Stillpoint, 1),
            (&[], Tool::Stillpoint, 0),
        ] {
            let mut args = words.iter().map(OsString::from).collect();
            assert_eq!((Tool::take(&mut args), args.len()), (tool, left), "{words:?}");
        }
    }
}
